# SPDX-License-Identifier: Apache-2.0
"""Expert choice: sigmoid scores, a correction bias for the choice only, normalised weights."""

from __future__ import annotations

import torch

from ..dispatch import use_kernel
from ..experts.pairs import SortedPairs
from . import reference
from .count import ChoiceCount

__all__ = ["ChoiceCount", "route", "route_sorted"]


def route(
    x: torch.Tensor,
    gate: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    scale: float,
    count: ChoiceCount | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [R, D], gate [E, D] acc, bias [E] acc -> (ids [R, top_k] int64 ascending, weights acc).

    Everything is done in acc: biases near 34 with steps far below a bf16 ULP choose the experts.
    Ties go to the lower expert id. The bias never enters a weight. A gate in bf16 stands for the
    same numbers in fp32, at half the bytes. `count`: where to count the choices, if anywhere.
    """
    assert x.shape[1] == gate.shape[1], (x.shape, gate.shape)
    assert bias.shape == gate.shape[:1], (x.shape, gate.shape)
    assert bias.dtype in (torch.float32, torch.float64), bias.dtype
    assert gate.dtype in (bias.dtype, torch.bfloat16), gate.dtype
    assert 0 < top_k <= gate.shape[0], (top_k, gate.shape)
    if x.is_cuda:
        from . import launch

        if use_kernel("route", "cuda", launch.unserved(x, bias)):
            return launch.route(x.contiguous(), gate, bias, top_k, scale, count)
    ids, weights = reference.route(x, gate.to(bias.dtype), bias, top_k, scale)
    if count is not None:
        count.add(ids)
    return ids, weights


def route_sorted(
    x: torch.Tensor,
    gate: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    scale: float,
    count: ChoiceCount | None,
    first: int,
    local: int,
    block_m: int,
) -> tuple[torch.Tensor, torch.Tensor, SortedPairs]:
    """`route` on CUDA, and the pairs of experts [first, first + local) in tiles of block_m rows."""
    from . import launch

    assert use_kernel("route", "cuda", launch.unserved(x, bias))
    x = x.contiguous()
    return launch.route_sorted(x, gate, bias, top_k, scale, count, first, local, block_m)
