# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""Block-fp8 products of many rows on Hopper, in Gluon; `kernel.many_rows` is their plain form.

One warp brings tiles by TMA into a ring of stages. Each of three warpgroups multiplies 64 rows by
the tile's columns and scales what it got while the tensor cores work for the others. The order of
every sum is that of the plain form, bit for bit; finished K chunks wait in shared memory. The
interpreter cannot run Gluon: there the plain form is used.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..pdl import pdl

ROWS = gl.constexpr(64)  # rows of one warpgroup
GROUPS = gl.constexpr(3)  # warpgroups that multiply
DEPTH = gl.constexpr(128)  # columns of K a stage: one scale
COLUMNS = gl.constexpr(128)  # of a tile
BAND = gl.constexpr(8)  # row tiles whose rows stay in L2 while the weight passes
REGISTERS = gl.constexpr(160)  # of a thread that multiplies
TILE = GROUPS.value * ROWS.value  # rows of a tile
TILE_LAYOUT = gl.NVMMASharedLayout(128, 8, 2)
PROGRAMS = 132


@gluon.jit
def wait_for_previous():
    """Programmatic dependent launch, as `triton_common.wait_for_previous`."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def let_next_start():
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def step(stage, phase, STAGES: gl.constexpr):
    """The stage after this one, and the phase of its barriers."""
    stage += 1
    phase = gl.where(stage == STAGES, phase ^ 1, phase)
    return gl.where(stage == STAGES, 0, stage), phase


@gluon.jit
def shared_memory(STAGES: gl.constexpr, CHUNKED: gl.constexpr):
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
def multiply(
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
def store(
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
def band_order(program, row_tiles, tiles):
    """(row tile, column tile) of a program that walks bands of BAND row tiles."""
    band = program // (BAND * tiles)
    height = gl.minimum(row_tiles - band * BAND, BAND)
    inside = program - band * BAND * tiles
    return band * BAND + inside % height, inside // height


@gluon.jit
def _place(work, rows, width):
    """(first row, first column) of a piece of work."""
    row_tiles = (rows + GROUPS * ROWS - 1) // (GROUPS * ROWS)
    row_tile, column = band_order(work, row_tiles, (width + COLUMNS - 1) // COLUMNS)
    return row_tile * GROUPS * ROWS, column * COLUMNS


@gluon.jit
def _produce(
    x, weight, rows, width, blocks, pieces, x_tiles, w_tiles, full, empty, STAGES: gl.constexpr
):
    wait_for_previous()
    stage = 0
    phase = 0
    for work in range(gl.program_id(0), pieces, gl.num_programs(0)):
        row, column = _place(work, rows, width)
        for block in range(blocks):
            mbarrier.wait(empty.index(stage), phase ^ 1)
            barrier = full.index(stage)
            mbarrier.expect(barrier, (GROUPS * ROWS + COLUMNS) * DEPTH)
            tma.async_copy_global_to_shared(
                weight, [column, block * DEPTH], barrier, w_tiles.index(stage)
            )
            for group in gl.static_range(GROUPS):
                tma.async_copy_global_to_shared(
                    x, [row + group * ROWS, block * DEPTH], barrier,
                    x_tiles.index(stage * GROUPS + group),
                )  # fmt: skip
            stage, phase = step(stage, phase, STAGES)


@gluon.jit
def _consume(
    x_scales, weight_scales, out, rows, width, blocks, per, pieces, x_tiles, w_tiles, full, empty,
    sums, GROUP: gl.constexpr, STAGES: gl.constexpr, CHUNKED: gl.constexpr,
):  # fmt: skip
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    wait_for_previous()
    stage = 0
    phase = 0
    for work in range(gl.program_id(0), pieces, gl.num_programs(0)):
        row, column = _place(work, rows, width)
        row += GROUP * ROWS
        mine = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, MMA))
        acc, stage, phase = multiply(
            x_scales + gl.minimum(mine, rows - 1), rows,
            weight_scales + (column // DEPTH) * blocks, blocks, per, stage, phase, x_tiles,
            w_tiles, full, empty, sums, GROUP, STAGES, CHUNKED,
        )  # fmt: skip
        store(acc, out, row, rows, column, width, sums, GROUP, CHUNKED)


@gluon.jit(do_not_specialize=["rows", "per", "pieces"])
def many_rows(
    x, x_scales, weight, weight_scales, out, rows, width, depth, per, pieces,
    STAGES: gl.constexpr, CHUNKED: gl.constexpr,
):  # fmt: skip
    """out [rows, width]; x and weight are descriptors of [64, 128] and [128, 128] boxes.

    A program takes every num_programs-th of `pieces` tiles of 192 x 128; CHUNKED: a sum has chunks
    of `per` blocks, not one.
    """
    blocks = depth // DEPTH
    x_tiles, w_tiles, full, empty, sums = shared_memory(STAGES, CHUNKED)
    let_next_start()
    gl.warp_specialize([
        (_consume, (
            x_scales, weight_scales, out, rows, width, blocks, per, pieces, x_tiles, w_tiles, full,
            empty, sums, gl.constexpr(0), STAGES, CHUNKED)),
        (_consume, (
            x_scales, weight_scales, out, rows, width, blocks, per, pieces, x_tiles, w_tiles, full,
            empty, sums, gl.constexpr(1), STAGES, CHUNKED)),
        (_consume, (
            x_scales, weight_scales, out, rows, width, blocks, per, pieces, x_tiles, w_tiles, full,
            empty, sums, gl.constexpr(2), STAGES, CHUNKED)),
        (_produce, (
            x, weight, rows, width, blocks, pieces, x_tiles, w_tiles, full, empty, STAGES)),
    ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip


def boxes(tensor: torch.Tensor, height: int) -> TensorDescriptor:
    """A descriptor of [height, 128] tiles of an fp8 matrix."""
    return TensorDescriptor.from_tensor(tensor, [height, DEPTH.value], TILE_LAYOUT)


def fills(rows: int, width: int) -> bool:
    """Whether so many tiles keep the programs busy; else the smaller ones of the plain form win."""
    tiles = -(-rows // TILE) * -(-width // COLUMNS.value)
    return 5 * tiles >= 4 * PROGRAMS * -(-tiles // PROGRAMS)


def linear(
    x: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor,
    out: torch.Tensor, chunks: int,
) -> None:  # fmt: skip
    """Fills out [R, N] with fp8 rows [R, K] times weight [N, K] transposed."""
    rows, width = out.shape
    blocks = x.shape[1] // DEPTH.value
    assert blocks % chunks == 0, (blocks, chunks)
    pieces = -(-rows // TILE) * -(-width // COLUMNS.value)
    many_rows[(min(pieces, PROGRAMS),)](
        boxes(x, ROWS.value), x_scales, boxes(weight, COLUMNS.value), weight_scales, out, rows,
        width, x.shape[1], blocks // chunks, pieces, 3 if chunks > 1 else 5, chunks > 1,
        num_warps=4, **pdl(),
    )  # fmt: skip
