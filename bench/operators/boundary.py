# SPDX-License-Identifier: Apache-2.0
"""The layer boundary over peers' memory: configurations only; `bench/boundary.py` runs it, since a
launch needs every rank's process."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from bench.registry import Case
from glmserve.kernels.boundary.launch import PeerMemory, boundary

WIDTH = 6144


def launches(device: torch.device) -> Iterator[tuple[str, Callable[[], object]]]:
    for size in (2, 8):
        table = torch.empty(size, dtype=torch.int64, device=device)
        state = torch.empty(2, dtype=torch.int32, device=device)
        memory = PeerMemory(1, size, table, table, state, 2048 * WIDTH)
        x = torch.empty(64, WIDTH, dtype=torch.bfloat16, device=device)
        # All forms for eight ranks; at two and four only the length of one loop differs.
        forms: list[tuple[torch.Tensor | None, bool, bool]] = [(x, False, True)]
        if size == 8:
            forms += [(x, True, True), (x, False, False), (None, False, True)]
        for residual, two_shot, fp8 in forms:
            yield (
                f"{size} ranks, two-shot {two_shot}, fp8 {fp8}",
                lambda m=memory, x=x, r=residual, t=two_shot, q=fp8: boundary(
                    m, x, r, x[0], 1e-5, q, t
                ),
            )


def cases() -> Iterator[Case]:
    return iter(())
