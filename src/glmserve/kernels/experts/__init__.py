# SPDX-License-Identifier: Apache-2.0
"""Routed experts of one rank: grouped gate_up, SwiGLU, grouped down, weighted combine.

Serves both expert layouts. Whole experts: the rank holds experts [first, first + E) and skips the
rest. Sliced: it holds a column slice of every expert, so `first` is 0 and each result is a partial
sum. Either way the ranks' results add up to the layer's.
"""

from __future__ import annotations

import torch

from ..dispatch import use_kernel
from ..linear.reference import QuantWeight
from ..quantise.reference import QuantRows
from . import reference
from .pairs import SortedPairs
from .reference import ExpertWeight, Int4Weight, first_tensor

__all__ = [
    "ExpertWeight",
    "Int4Weight",
    "SortedPairs",
    "experts",
    "first_tensor",
    "fused_ffn",
    "fused_tile",
    "sort_choices",
]


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: ExpertWeight,
    down: ExpertWeight,
    first: int,
    shared: torch.Tensor,
    quantised: QuantRows | None = None,
) -> torch.Tensor:
    """shared + sum over the row's local experts of weight * down(swiglu(gate_up x)), [R, D].

    x        [R, D]
    ids      [R, k] int64, experts of the whole model, ascending; weights [R, k] acc
    gate_up  [E, 2 I, D], gate rows first; down [E, D, I]: plain, block-fp8 (QuantWeight with a
             leading E) or int4 (Int4Weight)
    shared   [R, D], this rank's part of the shared expert, not scaled
    quantised  x in fp8 where an earlier kernel made it already (block-fp8 experts read it)
    Summed in acc in ascending order of the expert, rounded once. A row's bits do not depend on the
    rows beside it.
    """
    up, back = first_tensor(gate_up), first_tensor(down)
    assert ids.shape == weights.shape, (ids.shape, weights.shape)
    assert ids.shape[0] == x.shape[0], (ids.shape, weights.shape)
    assert up.shape[0] == back.shape[0], (up.shape, back.shape)
    assert x.shape[1] == back.shape[1], (x.shape, back.shape)
    assert shared.shape == x.shape, (shared.shape, x.shape)
    if isinstance(gate_up, torch.Tensor) and isinstance(down, torch.Tensor):
        assert gate_up.shape[1] == 2 * down.shape[2], (gate_up.shape, down.shape)
        assert x.shape[1] == gate_up.shape[2], (x.shape, gate_up.shape)
    if x.is_cuda:
        from . import launch

        if use_kernel("experts", "cuda", launch.unserved(x, gate_up, down)):
            return launch.experts(
                x.contiguous(), ids.contiguous(), weights.contiguous(), gate_up, down, first,
                shared.contiguous(), quantised,
            )  # fmt: skip
    return reference.experts(x, ids, weights, gate_up, down, first, shared)


def fused_tile(
    x: torch.Tensor,
    gate_up: ExpertWeight,
    down: ExpertWeight,
    shared_gate_up: torch.Tensor | QuantWeight,
    shared_down: torch.Tensor | QuantWeight,
) -> int | None:
    """Rows of a tile of sorted pairs for `fused_ffn`; None where it does not serve x [R, D]."""
    if not x.is_cuda:
        return None
    from . import fused_launch

    weights = (gate_up, down, shared_gate_up, shared_down)
    if not fused_launch.serves(len(x), x.dtype, weights):
        return None
    return fused_launch.block_rows(len(x), weights)


def fused_ffn(
    x: QuantRows,
    weights: torch.Tensor,
    pairs: SortedPairs,
    gate_up: ExpertWeight,
    down: ExpertWeight,
    shared_gate_up: torch.Tensor | QuantWeight,
    shared_down: torch.Tensor | QuantWeight,
) -> torch.Tensor:
    """`experts` with `mlp` of the shared expert as its shared part, in one to three kernels.

    weights [R, k] as there; pairs: the choices sorted by `route_sorted` or `sort_choices` in tiles
    of `fused_tile` rows, which serves these weights: block-fp8; shared_gate_up [2 I', D],
    shared_down [D, I']. The same bits as the separate operators.
    """
    from . import fused_launch

    assert isinstance(gate_up, QuantWeight)
    assert isinstance(down, QuantWeight)
    assert isinstance(shared_gate_up, QuantWeight)
    assert isinstance(shared_down, QuantWeight)
    return fused_launch.experts(
        x, weights.contiguous(), pairs, gate_up, down, (shared_gate_up, shared_down)
    )


def sort_choices(ids: torch.Tensor, first: int, local: int, tile: int) -> SortedPairs:
    """Choices [R, k] int64 on CUDA as pairs of experts [first, first + local), tiles of `tile`."""
    from . import launch

    return launch.sort_pairs(ids.contiguous(), first, local, tile)
