# SPDX-License-Identifier: Apache-2.0
"""The gated activation between an FFN's two projections, with its result in fp8 where asked."""

from __future__ import annotations

import torch

from ..dispatch import use_kernel
from ..quantise.reference import GROUP, QuantRows, quantise
from . import reference


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """[R, 2 I] = [gate | up] -> silu(gate) * up, [R, I]; computed in acc, one cast."""
    assert gate_up.shape[-1] % 2 == 0, gate_up.shape
    if gate_up.is_cuda:
        from . import launch

        if use_kernel("swiglu", "cuda", launch.unserved(gate_up.dtype)):
            return launch.swiglu(gate_up.contiguous())
    return reference.swiglu(gate_up)


def swiglu_quantised(gate_up: torch.Tensor) -> QuantRows:
    """quantise(swiglu(gate_up)) in one pass; I a multiple of 128."""
    assert gate_up.shape[1] % (2 * GROUP) == 0, gate_up.shape
    if gate_up.is_cuda:
        from . import launch

        if use_kernel("swiglu", "cuda", launch.unserved(gate_up.dtype)):
            return launch.swiglu_quantised(gate_up.contiguous())
    return quantise(reference.swiglu(gate_up))
