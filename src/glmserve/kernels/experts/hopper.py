# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""Block-fp8 products of many rows an expert on Hopper, in Gluon; `kernel.grouped_many` is their
plain form.

The tile is that of `linear.hopper`, by two warpgroups: experts have about 128 or 255 rows where a
step has 4096 or 8192. Rows come in the order of the pairs, so that TMA can bring them; `taking`
puts them there. Their scales come by `cp.async`: TMA wants lines of scales to begin at 16 bytes,
and an expert's first row may be any. A warpgroup whose 64 rows lie behind its expert's last one
only passes the stages on.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ..gluon_common import let_next_start, step, wait_for_previous
from ..linear.hopper import (
    COLUMNS,
    DEPTH,
    PROGRAMS,
    REGISTERS,
    ROWS,
    STAGES,
    boxes,
    multiply,
    ring,
    scale_lines,
    store_tile,
)
from ..linear.reference import QuantWeight
from ..pdl import pdl
from ..quantise.reference import QuantRows
from .pairs import SortedPairs
from .taking import take

__all__ = ["TILE", "grouped_linear"]

GROUPS = gl.constexpr(2)  # warpgroups that multiply
ARRIVALS = gl.constexpr(1 + 32)  # at a full stage: for the tiles, for the scales by every lane
TILE = GROUPS.value * ROWS.value  # rows of a tile


@gluon.jit
def _place(piece, pieces, tiles):
    """(expert, first row, row behind the last, column tile) of a piece of work; behind the last
    piece those of some tile, for reading only.

    All columns of a row tile, then the next one's: 132 programs are at three or four row tiles at a
    time, whose rows come from memory once, as the weights do that an expert's tiles share.
    """
    tile_expert, tile_begin, tile_end, columns = tiles
    piece = gl.where(piece < pieces, piece, 0)
    tile = piece // columns
    return (
        gl.maximum(gl.load(tile_expert + tile), 0),  # -1 where there is no tile at all
        gl.load(tile_begin + tile),
        gl.load(tile_end + tile),
        piece % columns,
    )


@gluon.jit
def _produce(brought, STAGES: gl.constexpr):
    (
        x, x_scales, x_stride, weight, tile_expert, tile_begin, tile_end, tile_count, width,
        columns, blocks, x_tiles, x_lines, w_tiles, full, empty,
    ) = brought  # fmt: skip
    wait_for_previous()
    WARP: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    lines = x_lines._reinterpret(
        gl.float32, [STAGES, GROUPS * ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    pieces = gl.load(tile_count) * columns
    tiles = (tile_expert, tile_begin, tile_end, columns)
    stage = 0
    phase = 0
    for piece in range(gl.program_id(0), pieces, gl.num_programs(0)):
        expert, row, stop, column = _place(piece, pieces, tiles)
        live = gl.minimum((stop - row + ROWS - 1) // ROWS, GROUPS)
        line = expert * width + column * COLUMNS
        mine = gl.minimum(row + gl.arange(0, GROUPS * ROWS, layout=WARP), stop - 1)
        x_line = x_scales + mine
        for block in range(blocks):
            mbarrier.wait(empty.index(stage), phase ^ 1)
            barrier = full.index(stage)
            for n in gl.static_range(1, GROUPS + 1):
                mbarrier.expect(barrier, (COLUMNS + n * ROWS) * DEPTH, pred=n == live)
            tma.async_copy_global_to_shared(
                weight, [line, block * DEPTH], barrier, w_tiles.index(stage)
            )
            for group in gl.static_range(GROUPS):
                tma.async_copy_global_to_shared(
                    x, [row + group * ROWS, block * DEPTH], barrier,
                    x_tiles.index(stage * GROUPS + group), pred=group < live,
                )  # fmt: skip
            async_copy.async_copy_global_to_shared(lines.index(stage), x_line)
            async_copy.mbarrier_arrive(barrier, increment_count=False)
            x_line += x_stride
            stage, phase = step(stage, phase, STAGES)


@gluon.jit
def _consume(
    shared, GROUP: gl.constexpr, STAGES: gl.constexpr, CHUNKED: gl.constexpr, EVEN: gl.constexpr
):
    (
        weight_scales, out, tile_expert, tile_begin, tile_end, tile_count, width, columns, blocks,
        per, x_tiles, x_lines, w_tiles, full, empty,
    ) = shared  # fmt: skip
    wait_for_previous()
    pieces = gl.load(tile_count) * columns
    tiles = (tile_expert, tile_begin, tile_end, columns)
    stage = 0
    phase = 0
    second = gl.minimum(1, blocks - 1)
    expert, row, stop, column = _place(gl.program_id(0), pieces, tiles)
    w_line = weight_scales + (expert * columns + column) * blocks
    w_even = gl.load(w_line)
    w_odd = gl.load(w_line + second)
    for piece in range(gl.program_id(0), pieces, gl.num_programs(0)):
        expert, row_after, stop_after, column_after = _place(
            piece + gl.num_programs(0), pieces, tiles
        )
        line_after = weight_scales + (expert * columns + column_after) * blocks
        if row + GROUP * ROWS < stop:
            acc, stage, phase = multiply(
                w_even, w_odd, w_line, blocks, per, stage, phase, x_tiles, x_lines, w_tiles, full,
                empty, GROUP, GROUPS, STAGES, CHUNKED, EVEN,
            )  # fmt: skip
            w_even = gl.load(line_after)
            w_odd = gl.load(line_after + second)
            store_tile(acc, out, row + GROUP * ROWS, stop, column * COLUMNS, width)
        else:
            w_even = gl.load(line_after)
            w_odd = gl.load(line_after + second)
            for _ in range(blocks):
                mbarrier.wait(full.index(stage), phase)
                mbarrier.arrive(empty.index(stage))
                stage, phase = step(stage, phase, STAGES)
        w_line = line_after
        row = row_after
        stop = stop_after
        column = column_after


@gluon.jit(do_not_specialize=["x_stride", "per"])
def grouped_many(
    x, x_scales, x_stride, weight, weight_scales, out, tile_expert, tile_begin, tile_end,
    tile_count, width, depth, per, STAGES: gl.constexpr, CHUNKED: gl.constexpr, EVEN: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """out [pairs, width] bf16. x [pairs, depth] and weight [experts * width, depth] are descriptors
    of [64, 128] and [128, 128] boxes, x_scales is [depth / 128, x_stride].

    CHUNKED: a sum has chunks of `per` blocks, not one; EVEN: `per` is.
    """
    blocks = depth // DEPTH
    columns = (width + COLUMNS - 1) // COLUMNS
    x_tiles, w_tiles, full, empty = ring(GROUPS, STAGES, COLUMNS, ARRIVALS)
    x_lines = scale_lines(GROUPS, STAGES)
    let_next_start()
    shared = (
        weight_scales, out, tile_expert, tile_begin, tile_end, tile_count, width, columns, blocks,
        per, x_tiles, x_lines, w_tiles, full, empty,
    )  # fmt: skip
    brought = (
        x, x_scales, x_stride, weight, tile_expert, tile_begin, tile_end, tile_count, width,
        columns, blocks, x_tiles, x_lines, w_tiles, full, empty,
    )  # fmt: skip
    gl.warp_specialize([
        (_consume, (shared, gl.constexpr(0), STAGES, CHUNKED, EVEN)),
        (_consume, (shared, gl.constexpr(1), STAGES, CHUNKED, EVEN)),
        (_produce, (brought, STAGES)),
    ], [4, 1], [REGISTERS, 40])  # fmt: skip


def grouped_linear(
    x: QuantRows, weight: QuantWeight, pairs: SortedPairs, top_k: int, chunks: int,
    out: torch.Tensor,
) -> None:  # fmt: skip
    """Fills out [pairs, width] bf16 with rows times their expert's weight; pairs in tiles of TILE.

    top_k > 0: x holds the step's rows; 0: x is in pair order.
    """
    assert pairs.block_m == TILE, pairs.block_m
    width, depth = weight.values.shape[1:]
    blocks, groups = depth // DEPTH.value, GROUPS.value
    assert blocks % chunks == 0, (blocks, chunks)
    rows, per = take(x, pairs, top_k) if top_k else x, blocks // chunks
    grouped_many[(PROGRAMS,)](
        boxes(rows.values, ROWS.value), rows.scales, rows.scales.shape[1],
        boxes(weight.values.view(-1, depth), COLUMNS.value), weight.scales, out, pairs.tile_expert,
        pairs.tile_begin, pairs.tile_end, pairs.tile_count, width, depth, per, STAGES[groups],
        chunks > 1, per % 2 == 0, REGISTERS[groups], num_warps=4, **pdl(),
    )  # fmt: skip
