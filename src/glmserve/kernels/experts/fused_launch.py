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


def serves(rows: int, dtype: torch.dtype, weights: tuple[object, ...]) -> bool:
    """Whether `experts` takes these rows and weights: (gate_up, down) of the routed experts, then,
    unless they are computed apart, of the shared one."""
    if rows > MOST_ROWS or dtype != torch.bfloat16:
        return False
    for gate_up, down in zip(weights[::2], weights[1::2], strict=True):
        if not isinstance(gate_up, QuantWeight) or not isinstance(down, QuantWeight):
            return False
        width, inner = down.values.shape[-2:]
        if width % GROUP or inner % GROUP:
            return False
        whole = down.values.dim() == 3 or plan(width, inner, True).chunks == 1
        if not whole or long_sum_chunks(inner, GROUP) > 1:
            return False
    return True


def block_rows(rows: int) -> int:
    """Rows of a tile."""
    return 16 if rows <= 256 else 64


def experts(
    x: QuantRows,
    weights: torch.Tensor,
    pairs: SortedPairs,
    gate_up: QuantWeight,
    down: QuantWeight,
    shared: tuple[QuantWeight, QuantWeight] | torch.Tensor,
) -> torch.Tensor:
    """The shared expert (its gate_up and down, or its result [R, D]) plus the weighted experts of
    every row, [R, D] bf16; weights [R, k], pairs sorted."""
    rows, depth = x.values.shape
    top_k, total = weights.shape[1], pairs.order.numel()
    inner, device, block_m = down.values.shape[2], x.values.device, pairs.block_m
    split = total <= _SPLIT_PAIRS
    chunks = long_sum_chunks(depth, GROUP)
    form = up_form(split, block_m)
    subs = GROUP // form.width
    _, tickets = workspace(device)
    hidden = empty_rows(total, inner, device)
    ways = chunks if split else 1
    partial = hidden.scales  # unused unless split
    if split:
        partial = torch.empty(ways, total, 2 * inner, dtype=torch.float32, device=device)
    if isinstance(shared, torch.Tensor):
        shared_inner, shared_chunks, shared_blocks, shared_programs = GROUP, 1, 0, 0
        shared_up, shared_down, shared_hidden, shared_partial = gate_up, down, hidden, partial
        shared_out = shared
    else:
        shared_up, shared_down = shared
        shared_inner = shared_down.values.shape[1]
        shared_chunks = plan(2 * shared_inner, depth, True).chunks
        shared_blocks = -(-rows // block_m)
        shared_programs = shared_blocks * (shared_inner // GROUP) * subs
        shared_hidden = empty_rows(rows, shared_inner, device)
        shared_partial = shared_hidden.scales
        if split:
            shared_programs *= shared_chunks
            shared_partial = torch.empty(
                shared_chunks, rows, 2 * shared_inner, dtype=torch.float32, device=device
            )
        shared_out = torch.empty(rows, depth, dtype=torch.bfloat16, device=device)
    items = pairs.max_tiles * (inner // GROUP) * subs * ways
    assert pairs.max_tiles * (inner // GROUP) + shared_programs <= tickets.numel()
    programs = min(items, form.programs * _MULTIPROCESSORS)
    tiles = (pairs.order, pairs.tile_expert, pairs.tile_begin, pairs.tile_end, pairs.tile_count)
    fused.gate_up_activated[(shared_programs + programs,)](
        *x, *gate_up, *shared_up, shared_down.values, *tiles, tickets,
        partial, *hidden, shared_partial, *shared_hidden, rows, total, inner, shared_inner, depth,
        chunks, shared_chunks, shared_programs, shared_blocks,
        top_k, form.width, block_m, split, form.stages, num_warps=form.warps, **pdl(),
    )  # fmt: skip
    form = down_form(split, block_m)
    combine = rows <= _COMBINE_ROWS and shared_blocks > 0
    parts = torch.empty(total, depth, dtype=torch.bfloat16, device=device)
    out = torch.empty(rows, depth, dtype=torch.bfloat16, device=device)
    items = (pairs.max_tiles + shared_blocks) * -(-depth // form.width)
    fused.down_combined[(min(items, form.programs * _MULTIPROCESSORS),)](
        *hidden, *down, *shared_hidden, *shared_down, *tiles, tickets, parts, shared_out,
        pairs.place, weights, out, rows, total, depth, inner, shared_inner, shared_blocks,
        pairs.max_tiles, top_k, form.width, block_m, combine, 16,
        split if AHEAD is None else AHEAD, form.stages, num_warps=form.warps, **pdl(),
    )  # fmt: skip
    if not combine:
        block = 1024
        kernel.combine_rows[(rows, -(-depth // block))](
            parts, pairs.place, weights, shared_out, out, total, depth, top_k, 1, block,
            num_warps=4, **pdl(),
        )  # fmt: skip
    return out
