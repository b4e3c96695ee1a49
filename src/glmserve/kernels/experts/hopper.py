# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""Block-fp8 products of many rows an expert on Hopper, in Gluon; `kernel.grouped_many` is their
plain form.

As in `linear.hopper` one warp brings tiles by TMA and three warpgroups multiply; finished K chunks
wait in shared memory. Rows come in the order of the pairs, so that TMA can bring them; `take_pairs`
puts them there. A warpgroup whose 64 rows lie behind its expert's last one only passes the stages
on.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..linear.hopper import (
    COLUMNS,
    DEPTH,
    PROGRAMS,
    ROWS,
    boxes,
    let_next_start,
    step,
    wait_for_previous,
)
from ..linear.reference import QuantWeight
from ..pdl import pdl
from ..quantise.launch import empty_rows
from ..quantise.reference import QuantRows
from .pairs import SortedPairs

__all__ = ["TILE", "grouped_linear"]

GROUPS = gl.constexpr(3)  # warpgroups that multiply
REGISTERS = gl.constexpr(160)  # of a thread that multiplies
TILE = GROUPS.value * ROWS.value  # rows of a tile
# Column tiles that an expert's rows meet before the next expert's: its rows come from memory once
# for all of them, and the weights pass once.
WIDTH = gl.constexpr(4)


@triton.jit(do_not_specialize=["rows", "pairs"])
def take_pairs(
    x, x_scales, order, count, out, out_scales, rows, pairs, width,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[p] = x[order[p] // TOP_K] for the pairs below `count`, as 4-byte words, and the scales
    [width / 32, pairs] likewise. width: words of a row."""
    pair = tl.program_id(0)
    if pair < tl.load(count):
        row = tl.load(order + pair) // TOP_K
        i = tl.arange(0, BLOCK)
        for begin in tl.range(0, width, BLOCK):
            inside = begin + i < width
            words = tl.load(x + row.to(tl.int64) * width + begin + i, mask=inside)
            tl.store(out + pair.to(tl.int64) * width + begin + i, words, mask=inside)
        groups = width // 32
        for begin in tl.range(0, groups, 64):
            group = begin + tl.arange(0, 64)
            scale = tl.load(x_scales + group.to(tl.int64) * rows + row, mask=group < groups)
            tl.store(out_scales + group.to(tl.int64) * pairs + pair, scale, mask=group < groups)


@gluon.jit
def _shared_memory(STAGES: gl.constexpr, CHUNKED: gl.constexpr):
    """(row tiles, weight tiles, full and empty barriers of the stages, chunk sums)."""
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    x_tiles = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * GROUPS, ROWS, DEPTH], SHARED)
    w_tiles = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, COLUMNS, DEPTH], SHARED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=GROUPS)
    SUMS: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    HEIGHT: gl.constexpr = GROUPS if CHUNKED else 1
    SIZE: gl.constexpr = ROWS if CHUNKED else 1
    sums = gl.allocate_shared_memory(gl.float32, [HEIGHT, SIZE, COLUMNS], SUMS)
    return x_tiles, w_tiles, full, empty, sums


@gluon.jit
def _block(
    acc, x_scale, w_scale, x_line, x_stride, w_line, block, blocks, per, stage, phase, x_tiles,
    w_tiles, full, empty, sums, GROUP: gl.constexpr, STAGES: gl.constexpr, CHUNKED: gl.constexpr,
):  # fmt: skip
    """acc plus one K block, whose scales are given; returns those of the block after the next."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    none = gl.zeros([ROWS, COLUMNS], gl.float32, MMA)
    mbarrier.wait(full.index(stage), phase)
    part = warpgroup_mma(
        x_tiles.index(stage * GROUPS + GROUP), w_tiles.index(stage).permute((1, 0)), none,
        use_acc=False, is_async=True,
    )  # fmt: skip
    scale = (x_scale * w_scale)[:, None]
    after = gl.minimum(block + 2, blocks - 1)
    x_scale = gl.load(x_line + after * x_stride)
    w_scale = gl.load(w_line + after)
    part = warpgroup_mma_wait(0, deps=[part])
    mbarrier.arrive(empty.index(stage))
    acc += part * scale
    if CHUNKED:
        if (block + 1) % per == 0:
            mine = sums.index(GROUP)
            if block >= per:
                acc += mine.load(MMA)
            if block + 1 < blocks:
                mine.store(acc)
                acc = gl.zeros([ROWS, COLUMNS], gl.float32, MMA)
    stage, phase = step(stage, phase, STAGES)
    return acc, x_scale, w_scale, stage, phase


@gluon.jit
def _multiply(
    x_line, x_stride, w_line, blocks, per, stage, phase, x_tiles, w_tiles, full, empty, sums,
    GROUP: gl.constexpr, STAGES: gl.constexpr, CHUNKED: gl.constexpr,
):  # fmt: skip
    """This warpgroup's 64 rows times the weight tile over all K blocks, in chunks of `per`.

    x_line: pointers to the rows' scales of block 0, w_line to the tile's. Scales of even and of odd
    blocks have registers of their own, so that a block does not wait for those of the next.
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    acc = gl.zeros([ROWS, COLUMNS], gl.float32, MMA)
    x_even = gl.load(x_line)
    w_even = gl.load(w_line)
    second = gl.minimum(1, blocks - 1)
    x_odd = gl.load(x_line + second * x_stride)
    w_odd = gl.load(w_line + second)
    for block in range(0, blocks, 2):
        acc, x_even, w_even, stage, phase = _block(
            acc, x_even, w_even, x_line, x_stride, w_line, block, blocks, per, stage, phase,
            x_tiles, w_tiles, full, empty, sums, GROUP, STAGES, CHUNKED,
        )  # fmt: skip
        if block + 1 < blocks:
            acc, x_odd, w_odd, stage, phase = _block(
                acc, x_odd, w_odd, x_line, x_stride, w_line, block + 1, blocks, per, stage, phase,
                x_tiles, w_tiles, full, empty, sums, GROUP, STAGES, CHUNKED,
            )  # fmt: skip
    return acc, stage, phase


@gluon.jit
def _store(
    acc, out, row, stop, column, width, sums, GROUP: gl.constexpr, CHUNKED: gl.constexpr
):  # fmt: skip
    """acc, rounded, to rows below `stop` and columns below `width` of out [.., width]."""
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    line = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
    n = column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, OUT))
    if CHUNKED:  # no shared memory is left for a conversion of its own
        sums.index(GROUP).store(acc)
        result = sums.index(GROUP).load(OUT).to(out.dtype.element_ty)
    else:
        result = gl.convert_layout(acc.to(out.dtype.element_ty), OUT)
    gl.store(
        out + line.to(gl.int64)[:, None] * width + n[None, :],
        result,
        mask=(line < stop)[:, None] & (n < width)[None, :],
    )


@gluon.jit
def _order(work, row_tiles, tiles):
    """(row tile, column tile) of a piece of work: all row tiles against WIDTH columns, then on."""
    group = work // (WIDTH * row_tiles)
    inside = work - group * WIDTH * row_tiles
    wide = gl.minimum(tiles - group * WIDTH, WIDTH)
    return inside // wide, group * WIDTH + inside % wide


@gluon.jit
def _produce(
    x, weight, tile_expert, tile_begin, tile_end, tile_count, width, blocks, x_tiles, w_tiles, full,
    empty, STAGES: gl.constexpr,
):  # fmt: skip
    wait_for_previous()
    columns = (width + COLUMNS - 1) // COLUMNS
    count = gl.load(tile_count)
    stage = 0
    phase = 0
    for work in range(gl.program_id(0), count * columns, gl.num_programs(0)):
        tile, column = _order(work, count, columns)
        row = gl.load(tile_begin + tile)
        live = gl.minimum((gl.load(tile_end + tile) - row + ROWS - 1) // ROWS, GROUPS)
        line = gl.load(tile_expert + tile) * width + column * COLUMNS
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
            stage, phase = step(stage, phase, STAGES)


@gluon.jit
def _consume(
    x_scales, weight_scales, out, tile_expert, tile_begin, tile_end, tile_count, pairs, width,
    blocks, per, x_tiles, w_tiles, full, empty, sums, GROUP: gl.constexpr, STAGES: gl.constexpr,
    CHUNKED: gl.constexpr,
):  # fmt: skip
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    wait_for_previous()
    columns = (width + COLUMNS - 1) // COLUMNS
    count = gl.load(tile_count)
    stage = 0
    phase = 0
    for work in range(gl.program_id(0), count * columns, gl.num_programs(0)):
        tile, column = _order(work, count, columns)
        row = gl.load(tile_begin + tile) + GROUP * ROWS
        stop = gl.load(tile_end + tile)
        if row < stop:
            expert = gl.load(tile_expert + tile)
            n0 = column * COLUMNS
            mine = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, MMA))
            w_line = expert * ((width + DEPTH - 1) // DEPTH) + n0 // DEPTH
            acc, stage, phase = _multiply(
                x_scales + gl.minimum(mine, stop - 1), pairs,
                weight_scales + w_line.to(gl.int64) * blocks, blocks, per, stage, phase, x_tiles,
                w_tiles, full, empty, sums, GROUP, STAGES, CHUNKED,
            )  # fmt: skip
            _store(acc, out, row, stop, n0, width, sums, GROUP, CHUNKED)
        else:
            for _ in range(blocks):
                mbarrier.wait(full.index(stage), phase)
                mbarrier.arrive(empty.index(stage))
                stage, phase = step(stage, phase, STAGES)


@gluon.jit(do_not_specialize=["pairs", "per"])
def grouped_many(
    x, x_scales, weight, weight_scales, out, tile_expert, tile_begin, tile_end, tile_count, pairs,
    width, depth, per, STAGES: gl.constexpr, CHUNKED: gl.constexpr,
):  # fmt: skip
    """out [pairs, width] bf16. x [pairs, depth] and weight [experts * width, depth] are descriptors
    of [64, 128] and [128, 128] boxes, x_scales is [depth / 128, pairs]; CHUNKED: a sum has chunks
    of `per` blocks, not one."""
    blocks = depth // DEPTH
    x_tiles, w_tiles, full, empty, sums = _shared_memory(STAGES, CHUNKED)
    let_next_start()
    gl.warp_specialize([
        (_consume, (
            x_scales, weight_scales, out, tile_expert, tile_begin, tile_end, tile_count, pairs,
            width, blocks, per, x_tiles, w_tiles, full, empty, sums, gl.constexpr(0), STAGES,
            CHUNKED)),
        (_consume, (
            x_scales, weight_scales, out, tile_expert, tile_begin, tile_end, tile_count, pairs,
            width, blocks, per, x_tiles, w_tiles, full, empty, sums, gl.constexpr(1), STAGES,
            CHUNKED)),
        (_consume, (
            x_scales, weight_scales, out, tile_expert, tile_begin, tile_end, tile_count, pairs,
            width, blocks, per, x_tiles, w_tiles, full, empty, sums, gl.constexpr(2), STAGES,
            CHUNKED)),
        (_produce, (
            x, weight, tile_expert, tile_begin, tile_end, tile_count, width, blocks, x_tiles,
            w_tiles, full, empty, STAGES)),
    ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip


def grouped_linear(
    x: QuantRows, weight: QuantWeight, pairs: SortedPairs, top_k: int, chunks: int,
    out: torch.Tensor,
) -> None:  # fmt: skip
    """Fills out [pairs, width] bf16 with rows times their expert's weight; pairs in tiles of TILE.

    top_k > 0: x holds the step's rows; 0: x is in pair order.
    """
    assert pairs.block_m == TILE, pairs.block_m
    width, depth = weight.values.shape[1:]
    blocks, total = depth // DEPTH.value, pairs.order.numel()
    assert blocks % chunks == 0, (blocks, chunks)
    rows = x
    if top_k:
        rows = empty_rows(total, depth, x.values.device)
        take_pairs[(total,)](
            x.values.view(torch.int32), x.scales, pairs.order, pairs.offsets[-1:],
            rows.values.view(torch.int32), rows.scales, x.values.shape[0], total, depth // 4,
            top_k, 512, num_warps=4,
        )  # fmt: skip
    grouped_many[(PROGRAMS,)](
        boxes(rows.values, ROWS.value), rows.scales, boxes(weight.values.view(-1, depth), 128),
        weight.scales, out, pairs.tile_expert, pairs.tile_begin, pairs.tile_end, pairs.tile_count,
        total, width, depth, blocks // chunks, 3 if chunks > 1 else 5, chunks > 1,
        num_warps=4, **pdl(),
    )  # fmt: skip
