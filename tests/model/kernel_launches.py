# SPDX-License-Identifier: Apache-2.0
"""What a pass launches: Triton kernels by name, and whatever torch would run besides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Neither reads nor writes an element: allocation and views.
NO_WORK = {
    "empty", "empty_like", "empty_strided", "new_empty", "view", "_unsafe_view", "reshape", "slice",
    "select", "as_strided", "detach", "alias", "transpose", "t", "split", "split_with_sizes",
    "unsqueeze", "squeeze", "flatten", "permute", "expand", "unbind", "lift_fresh",
}  # fmt: skip


class TorchCalls(TorchDispatchMode):
    """Counts torch operators that do work."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in NO_WORK:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def launched(run: bool = True) -> Iterator[Counter[str]]:
    """Kernel launches by name while it is open; `run` False leaves them out."""
    from triton.runtime.interpreter import GridExecutor
    from triton.runtime.jit import JITFunction

    found: Counter[str] = Counter()
    compiled, interpreted = JITFunction.run, GridExecutor.__call__

    def on_gpu(self: Any, *args: Any, **kwargs: Any) -> Any:
        found[self.__name__] += 1
        return compiled(self, *args, **kwargs) if run else None

    def in_interpreter(self: Any, *args: Any, **kwargs: Any) -> Any:
        found[self.fn.__name__] += 1
        return interpreted(self, *args, **kwargs) if run else None

    JITFunction.run, GridExecutor.__call__ = on_gpu, in_interpreter
    try:
        yield found
    finally:
        JITFunction.run, GridExecutor.__call__ = compiled, interpreted


def torch_work() -> TorchCalls:
    torch.empty(0)  # the mode may not be the first to touch torch
    return TorchCalls()
