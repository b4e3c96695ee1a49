# SPDX-License-Identifier: Apache-2.0
"""Host side of the fused block-fp8 FFN: which layers it serves, tiles and grids by rows."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..linear.launch import plan, workspace
from ..linear.reference import QuantWeight
from ..pdl import pdl
from ..quantise.launch import empty_rows
from ..quantise.reference import GROUP, QuantRows
from . import fused, kernel
from .pairs import SortedPairs, long_sum_chunks
from .reference import ExpertWeight

MOST_ROWS = 1536  # more are served by the separate kernels
_SPLIT_PAIRS = 256  # pairs up to which K chunks have programs of their own
_COMBINE_ROWS = 64  # rows up to which the last program of a column adds the experts up
_MULTIPROCESSORS = 132
AHEAD = None


class Form(NamedTuple):
    """How one launch cuts its work; nothing here shows in the result."""

    width: int  # gate columns of an item (as many up columns), or columns of down
    stages: int
    warps: int
    programs: int  # a multiprocessor


def up_form(split: bool, block_m: int) -> Form:
    if split:
        return Form(64, 5, 4, 2)
    return Form(128, 5, 4, 1) if block_m == 16 else Form(128, 4, 8, 1)


def down_form(split: bool, block_m: int) -> Form:
    return Form(64, 6, 4, 3) if split else Form(128, 4, 4, 2)


def serves(
    rows: int,
    dtype: torch.dtype,
    gate_up: ExpertWeight,
    down: ExpertWeight,
    shared_gate_up: torch.Tensor | QuantWeight,
    shared_down: torch.Tensor | QuantWeight,
) -> bool:
    """Whether a layer runs here; else its shared expert and its routed ones run separately."""
    weights = (gate_up, down, shared_gate_up, shared_down)
    if rows > MOST_ROWS or dtype != torch.bfloat16:
        return False
    if not all(isinstance(weight, QuantWeight) for weight in weights):
        return False
    assert isinstance(down, QuantWeight)  # as are all, says the line before
    assert isinstance(shared_down, QuantWeight)
    (_, width, inner), shared_inner = down.values.shape, shared_down.values.shape[1]
    if width % GROUP or inner % GROUP or shared_inner % GROUP:
        return False
    return long_sum_chunks(inner, GROUP) == plan(width, shared_inner, True).chunks == 1


def block_rows(rows: int) -> int:
    """Rows of a tile."""
    return 16 if rows <= 256 else 64


def experts(
    x: QuantRows,
    weights: torch.Tensor,
    pairs: SortedPairs,
    gate_up: QuantWeight,
    down: QuantWeight,
    shared_gate_up: QuantWeight,
    shared_down: QuantWeight,
) -> torch.Tensor:
    """The shared expert plus the weighted experts of every row, [R, D] bf16; pairs sorted."""
    rows, depth = x.values.shape
    top_k, total = weights.shape[1], pairs.order.numel()
    inner, shared_inner = down.values.shape[2], shared_down.values.shape[1]
    device, block_m = x.values.device, pairs.block_m
    split = total <= _SPLIT_PAIRS
    chunks = long_sum_chunks(depth, GROUP)
    shared_chunks = plan(2 * shared_inner, depth, True).chunks
    form = up_form(split, block_m)
    _, tickets = workspace(device)
    hidden = empty_rows(total, inner, device)
    shared_hidden = empty_rows(rows, shared_inner, device)
    partial = shared_partial = hidden.scales
    ways = shared_ways = 1
    if split:
        ways, shared_ways = chunks, shared_chunks
        partial = torch.empty(ways, total, 2 * inner, dtype=torch.float32, device=device)
        shared_partial = torch.empty(
            shared_ways, rows, 2 * shared_inner, dtype=torch.float32, device=device
        )
    row_blocks = -(-rows // block_m)
    subs = GROUP // form.width
    shared_programs = row_blocks * (shared_inner // GROUP) * subs * shared_ways
    items = pairs.max_tiles * (inner // GROUP) * subs * ways
    assert pairs.max_tiles * (inner // GROUP) + shared_programs <= tickets.numel()
    programs = min(items, form.programs * _MULTIPROCESSORS)
    fused.gate_up_activated[(shared_programs + programs,)](
        *x, *gate_up, *shared_gate_up, shared_down.values,
        pairs.order, pairs.tile_expert, pairs.tile_begin, pairs.tile_end, pairs.tile_count,
        tickets, partial, *hidden, shared_partial, *shared_hidden,
        rows, total, inner, shared_inner, depth, chunks, shared_chunks, shared_programs,
        top_k, form.width, block_m, split, form.stages, num_warps=form.warps, **pdl(),
    )  # fmt: skip
    form = down_form(split, block_m)
    combine = rows <= _COMBINE_ROWS
    parts = torch.empty(total, depth, dtype=torch.bfloat16, device=device)
    shared = torch.empty(rows, depth, dtype=torch.bfloat16, device=device)
    out = torch.empty(rows, depth, dtype=torch.bfloat16, device=device)
    items = (pairs.max_tiles + row_blocks) * -(-depth // form.width)
    fused.down_combined[(min(items, form.programs * _MULTIPROCESSORS),)](
        *hidden, *down, *shared_hidden, *shared_down,
        pairs.order, pairs.tile_expert, pairs.tile_begin, pairs.tile_end, pairs.tile_count,
        tickets, parts, shared, pairs.place, weights, out,
        rows, total, depth, inner, shared_inner, pairs.max_tiles,
        top_k, form.width, block_m, combine, 16, split if AHEAD is None else AHEAD, form.stages,
        num_warps=form.warps, **pdl(),
    )  # fmt: skip
    if not combine:
        block = 1024
        kernel.combine_rows[(rows, -(-depth // block))](
            parts, pairs.place, weights, shared, out, total, depth, top_k, 1, block, num_warps=4,
            **pdl(),
        )  # fmt: skip
    return out
