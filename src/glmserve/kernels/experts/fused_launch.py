# SPDX-License-Identifier: Apache-2.0
"""Host side of the fused block-fp8 FFN: which layers it serves, tiles and grids by rows; where
`stream` does not run it in one launch, the plain form in two or three.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..linear.launch import plan, workspace
from ..linear.reference import QuantWeight
from ..pdl import pdl
from ..quantise.launch import empty_rows
from ..quantise.reference import GROUP, QuantRows
from . import fused, stream_launch
from .combining import combine
from .pairs import FEW_ROWS, SortedPairs, long_sum_chunks

MOST_ROWS = 1536  # more are served by the separate kernels
_SPLIT_PAIRS = 32  # pairs up to which the K chunks of gate_up have programs of their own
_THIN_PAIRS = 256  # pairs up to which down has small items and adds the experts up itself
_STAGES = 4  # of gate_up
_MULTIPROCESSORS = 132

# The shared expert's gate_up and down, or what it gave [R, D].
Shared = tuple[QuantWeight, QuantWeight] | torch.Tensor


class Form(NamedTuple):
    """How down cuts its work; nothing here shows in the result."""

    width: int  # columns of an item
    stages: int
    programs: int  # a multiprocessor


_THIN, _WIDE = Form(64, 6, 3), Form(128, 4, 2)


def block_rows(rows: int, weights: tuple[object, ...]) -> int:
    """Rows of a tile for weights that `serves` takes: by the rows that an expert gets on average,
    R / 32 of R rows, as GLM has 256 experts, 8 a row."""
    if streams(rows, weights):
        return stream_launch.height(rows)
    return FEW_ROWS if rows <= 256 else 32


def streams(rows: int, weights: tuple[object, ...]) -> bool:
    """Whether these rows and weights, which `serves` takes, go in one launch."""
    gate_up, down, *shared = weights
    assert isinstance(gate_up, QuantWeight)
    assert isinstance(down, QuantWeight)
    both = None
    if shared:
        first, second = shared
        assert isinstance(first, QuantWeight)
        assert isinstance(second, QuantWeight)
        both = (first, second)
    return stream_launch.serves(rows, gate_up, down, both)


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


def experts(
    x: QuantRows,
    weights: torch.Tensor,
    pairs: SortedPairs,
    gate_up: QuantWeight,
    down: QuantWeight,
    shared: Shared,
) -> torch.Tensor:
    """The shared expert plus the weighted experts of every row, [R, D] bf16; weights [R, k], pairs
    sorted."""
    own = () if isinstance(shared, torch.Tensor) else shared
    if streams(len(x.values), (gate_up, down, *own)):
        return stream_launch.experts(x, weights, pairs, gate_up, down, shared)
    hidden, shared_hidden = activated(x, pairs, weights.shape[1], gate_up, shared)
    return combined(hidden, shared_hidden, pairs, weights, down, shared)


def activated(
    x: QuantRows, pairs: SortedPairs, top_k: int, gate_up: QuantWeight, shared: Shared
) -> tuple[QuantRows, QuantRows]:
    """quantise(swiglu(gate_up x)) of the pairs in their order, and of the rows by the shared
    expert (unused where `shared` is its result)."""
    rows, depth = x.values.shape
    total, inner = pairs.order.numel(), gate_up.values.shape[1] // 2
    device, block_m = x.values.device, pairs.block_m
    split = total <= _SPLIT_PAIRS
    chunks = long_sum_chunks(depth, GROUP)
    ways = chunks if split else 1
    _, tickets = workspace(device)
    hidden = empty_rows(total, inner, device)
    partial = torch.empty(ways, total, 2 * inner, dtype=torch.float32, device=device)
    if isinstance(shared, torch.Tensor):
        shared_inner, shared_chunks, shared_slots, shared_ways = GROUP, 1, 0, 1
        shared_up, shared_down, shared_hidden, shared_partial = gate_up, gate_up, hidden, partial
    else:
        shared_up, shared_down = shared
        shared_inner = shared_down.values.shape[1]
        shared_chunks = plan(2 * shared_inner, depth, True).chunks
        shared_slots = -(-rows // block_m) * (shared_inner // GROUP)
        shared_ways = shared_chunks if split else 1
        shared_hidden = empty_rows(rows, shared_inner, device)
        shared_partial = torch.empty(
            shared_ways, rows, 2 * shared_inner, dtype=torch.float32, device=device
        )
    subs = fused.SUBS.value
    shared_programs = shared_slots * subs * shared_ways
    slots = pairs.max_tiles * (inner // GROUP)
    assert slots + shared_slots <= tickets.numel(), (slots, shared_slots)
    # Registers let two programs with tiles of 32 rows into a multiprocessor, three with 16.
    fitting = _MULTIPROCESSORS * (3 if block_m == FEW_ROWS else 2)
    items = slots * subs * ways + shared_programs
    fused.gate_up_activated[(max(shared_programs, min(items, fitting)),)](
        *x, *gate_up, *shared_up, shared_down.values, pairs.order, pairs.tile_expert,
        pairs.tile_begin, pairs.tile_end, pairs.tile_count, tickets, partial, *hidden,
        shared_partial, *shared_hidden, rows, total, inner, shared_inner, depth, chunks,
        shared_chunks, shared_programs, shared_slots, pairs.max_tiles, top_k, block_m, split,
        _STAGES, num_warps=4, **pdl(),
    )  # fmt: skip
    return hidden, shared_hidden


def combined(
    hidden: QuantRows,
    shared_hidden: QuantRows,
    pairs: SortedPairs,
    weights: torch.Tensor,
    down: QuantWeight,
    shared: Shared,
) -> torch.Tensor:
    """[R, D]: the shared expert plus the weighted sums of down times `hidden` of the pairs."""
    rows, top_k = weights.shape
    total, inner = hidden.values.shape
    count, depth, _ = down.values.shape
    device, block_m = hidden.values.device, pairs.block_m
    thin = total <= _THIN_PAIRS
    form = _THIN if thin else _WIDE
    _, tickets = workspace(device)
    shared_down, shared_inner, shared_blocks = down, inner, 0
    parts = torch.empty(total, depth, dtype=torch.bfloat16, device=device)
    if isinstance(shared, torch.Tensor):
        shared_out = shared
    else:
        shared_down = shared[1]
        shared_inner, shared_blocks = shared_down.values.shape[1], -(-rows // block_m)
        shared_out = torch.empty(rows, depth, dtype=torch.bfloat16, device=device)
    out = torch.empty(rows, depth, dtype=torch.bfloat16, device=device)
    in_place = thin and shared_blocks > 0  # the last program of a column adds the experts up
    items = (pairs.max_tiles + shared_blocks) * -(-depth // form.width)
    fused.down_combined[(min(items, form.programs * _MULTIPROCESSORS),)](
        *hidden, *down, *shared_hidden, *shared_down, pairs.tile_expert, pairs.tile_begin,
        pairs.tile_end, pairs.tile_count, tickets, parts, shared_out, pairs.place, weights, out,
        rows, total, depth, inner, shared_inner, shared_blocks, pairs.max_tiles, count, top_k,
        form.width, block_m, in_place, 16, thin, form.stages, num_warps=4, **pdl(),
    )  # fmt: skip
    return out if in_place else combine(parts[None], pairs, weights, shared_out)
