# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""Block-fp8 products of many rows on Hopper, in Gluon; `kernel.many_rows` is their plain form.

One warp brings tiles and the rows' scales by TMA into a ring of stages. Each of two or three
warpgroups multiplies 64 rows by the tile's columns and scales what it got while the tensor cores
work for the others. The order of every sum is that of the plain form, bit for bit: two warpgroups
have registers for the sum of finished K chunks beside a chunk's own, three take whole sums only.
What a tile needs before its first product is asked for before the tile before it is stored. The
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

from ..gluon_common import let_next_start, step, wait_for_previous
from ..pdl import pdl

ROWS = gl.constexpr(64)  # rows of one warpgroup
DEPTH = gl.constexpr(128)  # columns of K a stage: one scale
COLUMNS = gl.constexpr(128)  # of a tile
BAND = gl.constexpr(8)  # row tiles whose rows stay in L2 while the weight passes
STAGES = {2: 6, 3: 5}  # by the number of warpgroups, as
REGISTERS = {2: 232, 3: 160}  # of a thread that multiplies
TILE_LAYOUT = gl.NVMMASharedLayout(128, 8, 2)
LINE_LAYOUT = gl.NVMMASharedLayout(0, 32, 2)
PROGRAMS = 132


@gluon.jit
def ring(
    GROUPS: gl.constexpr, STAGES: gl.constexpr, COLUMNS: gl.constexpr, ARRIVALS: gl.constexpr = 1
):  # fmt: skip
    """(row tiles, weight tiles, full and empty barriers) of the stages; a full one takes
    ARRIVALS."""
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    x_tiles = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * GROUPS, ROWS, DEPTH], SHARED)
    w_tiles = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, COLUMNS, DEPTH], SHARED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=ARRIVALS)
        mbarrier.init(empty.index(stage), count=GROUPS)
    return x_tiles, w_tiles, full, empty


@gluon.jit
def scale_lines(GROUPS: gl.constexpr, STAGES: gl.constexpr):
    """Room for the rows' scales of the stages."""
    LINES: gl.constexpr = gl.NVMMASharedLayout(0, 32, 2)
    return gl.allocate_shared_memory(gl.float32, [STAGES * GROUPS, 1, ROWS], LINES)


@gluon.jit
def _block(
    acc, w_scale, w_line, block, blocks, stage, phase, x_tiles, lines, w_tiles, full, empty,
    GROUP: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """acc plus one K block, whose weight's scale is given; returns the block's after the next."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    none = gl.zeros([ROWS, COLUMNS], gl.float32, MMA)
    mbarrier.wait(full.index(stage), phase)
    part = warpgroup_mma(
        x_tiles.index(stage * GROUPS + GROUP), w_tiles.index(stage).permute((1, 0)), none,
        use_acc=False, is_async=True,
    )  # fmt: skip
    scale = (lines.index(stage * GROUPS + GROUP).load(gl.SliceLayout(1, MMA)) * w_scale)[:, None]
    w_scale = gl.load(w_line + gl.minimum(block + 2, blocks - 1))
    part = warpgroup_mma_wait(0, deps=[part])
    mbarrier.arrive(empty.index(stage))
    acc += part * scale
    stage, phase = step(stage, phase, STAGES)
    return acc, w_scale, stage, phase


@gluon.jit
def multiply(
    w_even, w_odd, w_line, blocks, per, stage, phase, x_tiles, x_lines, w_tiles, full, empty,
    GROUP: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, CHUNKED: gl.constexpr,
    EVEN: gl.constexpr,
):  # fmt: skip
    """This warpgroup's 64 rows times the weight tile over all K blocks, in chunks of `per`.

    w_line: pointer to the tile's scales, w_even and w_odd the first two. Those of even and of odd
    blocks have registers of their own, so that a block does not wait for the next one's.
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    lines = x_lines._reinterpret(
        gl.float32, [STAGES * GROUPS, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    acc = gl.zeros([ROWS, COLUMNS], gl.float32, MMA)
    total = acc
    for begin in range(0, blocks, per):
        for block in range(begin, begin + per, 2):
            acc, w_even, stage, phase = _block(
                acc, w_even, w_line, block, blocks, stage, phase, x_tiles, lines, w_tiles, full,
                empty, GROUP, GROUPS, STAGES,
            )  # fmt: skip
            if EVEN or block + 1 < begin + per:
                acc, w_odd, stage, phase = _block(
                    acc, w_odd, w_line, block + 1, blocks, stage, phase, x_tiles, lines, w_tiles,
                    full, empty, GROUP, GROUPS, STAGES,
                )  # fmt: skip
        if CHUNKED:
            total += acc
            acc = gl.zeros([ROWS, COLUMNS], gl.float32, MMA)
            if not EVEN:  # the next chunk begins with the other's
                w_even, w_odd = w_odd, w_even
    if CHUNKED:
        acc = total
    return acc, stage, phase


@gluon.jit
def store_tile(acc, out, row, rows, column, width):
    """acc, rounded, to rows below `rows` and columns below `width` of out [rows, width]."""
    # Each warp keeps its rows: lanes of a row exchange pairs, no shared memory, no barrier.
    OUT: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 128],
    )  # fmt: skip
    line = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
    n = column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, OUT))
    gl.store(
        out + line.to(gl.int64)[:, None] * width + n[None, :],
        gl.convert_layout(acc.to(out.dtype.element_ty), OUT),
        mask=(line < rows)[:, None] & (n < width)[None, :],
    )


@gluon.jit
def _place(piece, pieces, rows, columns, HEIGHT: gl.constexpr):
    """(first row, first column) of a tile, in bands of BAND row tiles; 0 of one that is not."""
    band = piece // (BAND * columns)
    height = gl.maximum(gl.minimum((rows + HEIGHT - 1) // HEIGHT - band * BAND, BAND), 1)
    inside = piece - band * BAND * columns
    there = piece < pieces
    row = gl.where(there, (band * BAND + inside % height) * HEIGHT, 0)
    return row, gl.where(there, inside // height, 0) * COLUMNS


@gluon.jit
def _produce(brought, GROUPS: gl.constexpr, STAGES: gl.constexpr):
    (
        x, x_scales, weight, rows, columns, blocks, pieces, x_tiles, x_lines, w_tiles, full, empty,
    ) = brought  # fmt: skip
    wait_for_previous()
    stage = 0
    phase = 0
    for piece in range(gl.program_id(0), pieces, gl.num_programs(0)):
        row, column = _place(piece, pieces, rows, columns, GROUPS * ROWS)
        for block in range(blocks):
            mbarrier.wait(empty.index(stage), phase ^ 1)
            barrier = full.index(stage)
            mbarrier.expect(barrier, (COLUMNS + GROUPS * ROWS) * DEPTH + GROUPS * ROWS * 4)
            tma.async_copy_global_to_shared(
                weight, [column, block * DEPTH], barrier, w_tiles.index(stage)
            )
            for group in gl.static_range(GROUPS):
                tma.async_copy_global_to_shared(
                    x, [row + group * ROWS, block * DEPTH], barrier,
                    x_tiles.index(stage * GROUPS + group),
                )  # fmt: skip
                tma.async_copy_global_to_shared(
                    x_scales, [block, row + group * ROWS], barrier,
                    x_lines.index(stage * GROUPS + group),
                )  # fmt: skip
            stage, phase = step(stage, phase, STAGES)


@gluon.jit
def _consume(
    shared, GROUP: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, CHUNKED: gl.constexpr,
    EVEN: gl.constexpr,
):  # fmt: skip
    (
        weight_scales, out, rows, width, columns, blocks, per, pieces, x_tiles, x_lines, w_tiles,
        full, empty,
    ) = shared  # fmt: skip
    wait_for_previous()
    stage = 0
    phase = 0
    second = gl.minimum(1, blocks - 1)
    row, column = _place(gl.program_id(0), pieces, rows, columns, GROUPS * ROWS)
    w_line = weight_scales + (column // DEPTH) * blocks
    w_even = gl.load(w_line)
    w_odd = gl.load(w_line + second)
    for piece in range(gl.program_id(0), pieces, gl.num_programs(0)):
        acc, stage, phase = multiply(
            w_even, w_odd, w_line, blocks, per, stage, phase, x_tiles, x_lines, w_tiles, full,
            empty, GROUP, GROUPS, STAGES, CHUNKED, EVEN,
        )  # fmt: skip
        row_after, column_after = _place(
            piece + gl.num_programs(0), pieces, rows, columns, GROUPS * ROWS
        )
        w_line = weight_scales + (column_after // DEPTH) * blocks
        w_even = gl.load(w_line)
        w_odd = gl.load(w_line + second)
        store_tile(acc, out, row + GROUP * ROWS, rows, column, width)
        row = row_after
        column = column_after


@gluon.jit(do_not_specialize=["rows", "per", "pieces"])
def many_rows(
    x, x_scales, weight, weight_scales, out, rows, width, depth, per, pieces,
    GROUPS: gl.constexpr, STAGES: gl.constexpr, CHUNKED: gl.constexpr, EVEN: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """out [rows, width] bf16; x, weight and x_scales are descriptors of [64, 128], [128, 128] and
    [1, 64] boxes.

    A program takes every num_programs-th of `pieces` tiles of GROUPS * 64 x 128; CHUNKED: a sum has
    chunks of `per` blocks, not one; EVEN: `per` is.
    """
    x_tiles, w_tiles, full, empty = ring(GROUPS, STAGES, COLUMNS)
    x_lines = scale_lines(GROUPS, STAGES)
    let_next_start()
    blocks = depth // DEPTH
    columns = (width + COLUMNS - 1) // COLUMNS
    shared = (
        weight_scales, out, rows, width, columns, blocks, per, pieces, x_tiles, x_lines, w_tiles,
        full, empty,
    )  # fmt: skip
    brought = (
        x, x_scales, weight, rows, columns, blocks, pieces, x_tiles, x_lines, w_tiles, full, empty,
    )  # fmt: skip
    if GROUPS == 2:
        gl.warp_specialize([
            (_consume, (shared, gl.constexpr(0), GROUPS, STAGES, CHUNKED, EVEN)),
            (_consume, (shared, gl.constexpr(1), GROUPS, STAGES, CHUNKED, EVEN)),
            (_produce, (brought, GROUPS, STAGES)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (shared, gl.constexpr(0), GROUPS, STAGES, CHUNKED, EVEN)),
            (_consume, (shared, gl.constexpr(1), GROUPS, STAGES, CHUNKED, EVEN)),
            (_consume, (shared, gl.constexpr(2), GROUPS, STAGES, CHUNKED, EVEN)),
            (_produce, (brought, GROUPS, STAGES)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip


def boxes(tensor: torch.Tensor, height: int) -> TensorDescriptor:
    """A descriptor of [height, 128] tiles of an fp8 matrix."""
    return TensorDescriptor.from_tensor(tensor, [height, DEPTH.value], TILE_LAYOUT)


def _lines(scales: torch.Tensor) -> TensorDescriptor:
    """A descriptor of 64 rows' scales of one block. TMA wants lines of whole 16 bytes."""
    missing = -scales.shape[1] % 4
    if missing:
        scales = torch.nn.functional.pad(scales, (0, missing))
    return TensorDescriptor.from_tensor(scales, [1, ROWS.value], LINE_LAYOUT)


def _groups(chunks: int) -> int:
    """Warpgroups of a program."""
    return 3 if chunks == 1 else 2


def _pieces(rows: int, width: int, groups: int) -> int:
    return -(-rows // (groups * ROWS.value)) * -(-width // COLUMNS.value)


def fills(rows: int, width: int, chunks: int) -> bool:
    """Whether so many tiles keep the programs busy; else the smaller ones of the plain form win."""
    pieces = _pieces(rows, width, _groups(chunks))
    return 5 * pieces >= 4 * PROGRAMS * -(-pieces // PROGRAMS)


def linear(
    x: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor,
    out: torch.Tensor, chunks: int,
) -> None:  # fmt: skip
    """Fills out [R, N] with fp8 rows [R, K] times weight [N, K] transposed."""
    rows, width = out.shape
    blocks, groups = x.shape[1] // DEPTH.value, _groups(chunks)
    assert blocks % chunks == 0, (blocks, chunks)
    pieces, per = _pieces(rows, width, groups), blocks // chunks
    many_rows[(min(pieces, PROGRAMS),)](
        boxes(x, ROWS.value), _lines(x_scales), boxes(weight, COLUMNS.value), weight_scales, out,
        rows, width, x.shape[1], per, pieces, groups, STAGES[groups], chunks > 1, per % 2 == 0,
        REGISTERS[groups], num_warps=4, **pdl(),
    )  # fmt: skip
