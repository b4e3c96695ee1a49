# SPDX-License-Identifier: Apache-2.0
"""Block-fp8 products of many rows on Hopper, written in Gluon; `kernel.many_rows` is its plain form.

One warp brings tiles by TMA into a ring of stages. Each warpgroup multiplies 64 rows by the tile's
columns and scales what it got while the tensor cores work for the others. The order of every sum is
that of the plain form, bit for bit. The interpreter cannot run Gluon: there the plain form is used.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

ROWS = gl.constexpr(64)  # rows of one warpgroup
DEPTH = gl.constexpr(128)  # columns of K a stage: one scale
TILE_LAYOUT = gl.NVMMASharedLayout(128, 8, 2)


@gluon.jit
def wait_for_previous(PDL: gl.constexpr):
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def let_next_start(PDL: gl.constexpr):
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip


@gluon.jit
def step(stage, phase, STAGES: gl.constexpr):
    """The stage after this one, and the phase of its barriers."""
    stage += 1
    phase = gl.where(stage == STAGES, phase ^ 1, phase)
    return gl.where(stage == STAGES, 0, stage), phase


@gluon.jit
def bring(
    x, weight, row, column, begin, end, stage, phase, x_tiles, w_tiles, full, empty,
    GROUPS: gl.constexpr, STAGES: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """Fills the ring with the K blocks [begin, end) of GROUPS x 64 rows and of a weight tile."""
    for block in range(begin, end):
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
    return stage, phase


@gluon.jit
def multiply(
    x_line, x_stride, w_line, begin, end, per, stage, phase, x_tiles, w_tiles, full, empty,
    GROUP: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, COLUMNS: gl.constexpr,
    CHUNKED: gl.constexpr,
):  # fmt: skip
    """Sum over the K blocks [begin, end) of this warpgroup's 64 rows times the weight tile.

    x_line: pointers to the rows' scales of block 0. CHUNKED: every `per` blocks the sum is put
    aside and begun anew.
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    acc = gl.zeros([ROWS, COLUMNS], gl.float32, MMA)
    total = gl.zeros([ROWS, COLUMNS], gl.float32, MMA)
    none = gl.zeros([ROWS, COLUMNS], gl.float32, MMA)
    x_scale = gl.load(x_line + begin * x_stride)
    w_scale = gl.load(w_line + begin)
    for block in range(begin, end):
        mbarrier.wait(full.index(stage), phase)
        part = warpgroup_mma(
            x_tiles.index(stage * GROUPS + GROUP), w_tiles.index(stage).permute((1, 0)), none,
            use_acc=False, is_async=True,
        )  # fmt: skip
        scale = (x_scale * w_scale)[:, None]
        # The next block's scales travel under this block's products.
        after = gl.minimum(block + 1, end - 1)
        x_scale = gl.load(x_line + after * x_stride)
        w_scale = gl.load(w_line + after)
        part = warpgroup_mma_wait(0, deps=[part])
        mbarrier.arrive(empty.index(stage))
        acc += part * scale
        if CHUNKED:
            if (block + 1) % per == 0:
                total += acc
                acc = gl.zeros([ROWS, COLUMNS], gl.float32, MMA)
        stage, phase = step(stage, phase, STAGES)
    if CHUNKED:
        acc = total + acc
    return acc, stage, phase


@gluon.jit
def band_order(program, row_tiles, tiles, BAND: gl.constexpr):
    """(row tile, column tile) of a program that walks bands of BAND row tiles."""
    band = program // (BAND * tiles)
    height = gl.minimum(row_tiles - band * BAND, BAND)
    inside = program - band * BAND * tiles
    return band * BAND + inside % height, inside // height


@gluon.jit
def _place(work, rows, width, blocks, per, ways, GROUPS: gl.constexpr, COLUMNS: gl.constexpr,
           BAND: gl.constexpr):  # fmt: skip
    """(first row, first column, first and last K block, chunk, tile) of a piece of work."""
    tile = work // ways
    chunk = work % ways
    row_tiles = (rows + GROUPS * ROWS - 1) // (GROUPS * ROWS)
    row_tile, column = band_order(tile, row_tiles, (width + COLUMNS - 1) // COLUMNS, BAND)
    begin = 0
    end = blocks
    if ways > 1:
        begin = chunk * per
        end = gl.minimum(begin + per, blocks)
    return row_tile * GROUPS * ROWS, column * COLUMNS, begin, end, chunk, tile


@gluon.jit
def _produce(
    x, weight, rows, width, blocks, per, ways, pieces, x_tiles, w_tiles, full, empty,
    GROUPS: gl.constexpr, STAGES: gl.constexpr, COLUMNS: gl.constexpr, BAND: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    stage = 0
    phase = 0
    for work in range(gl.program_id(0), pieces, gl.num_programs(0)):
        row, column, begin, end, _, _ = _place(
            work, rows, width, blocks, per, ways, GROUPS, COLUMNS, BAND
        )
        stage, phase = bring(
            x, weight, row, column, begin, end, stage, phase, x_tiles, w_tiles, full, empty,
            GROUPS, STAGES, COLUMNS,
        )  # fmt: skip


@gluon.jit
def _consume(
    x_scales, weight_scales, partial, tickets, out, rows, width, blocks, per, ways, pieces,
    x_tiles, w_tiles, full, empty, GROUP: gl.constexpr, GROUPS: gl.constexpr,
    STAGES: gl.constexpr, COLUMNS: gl.constexpr, CHUNKED: gl.constexpr, SPLIT: gl.constexpr,
    BAND: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    wait_for_previous(PDL)
    stage = 0
    phase = 0
    for work in range(gl.program_id(0), pieces, gl.num_programs(0)):
        row, column, begin, end, chunk, tile = _place(
            work, rows, width, blocks, per, ways, GROUPS, COLUMNS, BAND
        )
        row += GROUP * ROWS
        mine = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, MMA))
        w_line = weight_scales + (column // DEPTH) * blocks
        acc, stage, phase = multiply(
            x_scales + gl.minimum(mine, rows - 1), rows, w_line, begin, end, per, stage, phase,
            x_tiles, w_tiles, full, empty, GROUP, GROUPS, STAGES, COLUMNS,
            CHUNKED and not SPLIT,
        )  # fmt: skip
        line = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
        n = column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, OUT))
        target = out + line.to(gl.int64)[:, None] * width + n[None, :]
        wanted = (line < rows)[:, None] & (n < width)[None, :]
        if SPLIT:
            SIZE: gl.constexpr = ROWS * COLUMNS
            m = gl.arange(0, ROWS, layout=gl.SliceLayout(1, MMA))
            k = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, MMA))
            slot = tile * GROUPS + GROUP
            place = partial + slot * ways * SIZE + m[:, None] * COLUMNS + k[None, :]
            gl.store(place + chunk * SIZE, acc)
            gl.thread_barrier()  # every thread's partials before the ticket
            ticket = gl.atomic_add(tickets + slot, 1, sem="acq_rel")
            if ticket == ways - 1:
                gl.store(tickets + slot, 0)
                acc = gl.load(place, cache_modifier=".cg")
                for other in range(1, ways):
                    acc += gl.load(place + other * SIZE, cache_modifier=".cg")
                done = gl.convert_layout(acc.to(gl.bfloat16), OUT)
                gl.store(target, done, mask=wanted)
        else:
            gl.store(target, gl.convert_layout(acc.to(gl.bfloat16), OUT), mask=wanted)


@gluon.jit(do_not_specialize=["rows", "per", "ways", "pieces"])
def many_rows(
    x, x_scales, weight, weight_scales, partial, tickets, out, rows, width, depth, per, ways,
    pieces, GROUPS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr,
    CHUNKED: gl.constexpr, SPLIT: gl.constexpr, BAND: gl.constexpr, REGISTERS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """out [rows, width] bf16; x and weight are descriptors of [64, 128] and [COLUMNS, 128] boxes.

    A program takes every num_programs-th of `pieces` tiles (SPLIT: of `ways` chunks of each tile).
    """
    blocks = depth // DEPTH
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    x_tiles = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * GROUPS, ROWS, DEPTH], SHARED)
    w_tiles = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, COLUMNS, DEPTH], SHARED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=GROUPS)
    let_next_start(PDL)
    if GROUPS == 1:
        gl.warp_specialize([
            (_consume, (
                x_scales, weight_scales, partial, tickets, out, rows, width, blocks, per, ways,
                pieces, x_tiles, w_tiles, full, empty, gl.constexpr(0), GROUPS, STAGES, COLUMNS, CHUNKED, SPLIT,
                BAND, PDL)),
            (_produce, (
                x, weight, rows, width, blocks, per, ways, pieces, x_tiles, w_tiles, full, empty,
                GROUPS, STAGES, COLUMNS, BAND, PDL)),
        ], [1], [24])  # fmt: skip
    elif GROUPS == 2:
        gl.warp_specialize([
            (_consume, (
                x_scales, weight_scales, partial, tickets, out, rows, width, blocks, per, ways,
                pieces, x_tiles, w_tiles, full, empty, gl.constexpr(0), GROUPS, STAGES, COLUMNS, CHUNKED, SPLIT,
                BAND, PDL)),
            (_consume, (
                x_scales, weight_scales, partial, tickets, out, rows, width, blocks, per, ways,
                pieces, x_tiles, w_tiles, full, empty, gl.constexpr(1), GROUPS, STAGES, COLUMNS, CHUNKED, SPLIT,
                BAND, PDL)),
            (_produce, (
                x, weight, rows, width, blocks, per, ways, pieces, x_tiles, w_tiles, full, empty,
                GROUPS, STAGES, COLUMNS, BAND, PDL)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (
                x_scales, weight_scales, partial, tickets, out, rows, width, blocks, per, ways,
                pieces, x_tiles, w_tiles, full, empty, gl.constexpr(0), GROUPS, STAGES, COLUMNS, CHUNKED, SPLIT,
                BAND, PDL)),
            (_consume, (
                x_scales, weight_scales, partial, tickets, out, rows, width, blocks, per, ways,
                pieces, x_tiles, w_tiles, full, empty, gl.constexpr(1), GROUPS, STAGES, COLUMNS, CHUNKED, SPLIT,
                BAND, PDL)),
            (_consume, (
                x_scales, weight_scales, partial, tickets, out, rows, width, blocks, per, ways,
                pieces, x_tiles, w_tiles, full, empty, gl.constexpr(2), GROUPS, STAGES, COLUMNS, CHUNKED, SPLIT,
                BAND, PDL)),
            (_produce, (
                x, weight, rows, width, blocks, per, ways, pieces, x_tiles, w_tiles, full, empty,
                GROUPS, STAGES, COLUMNS, BAND, PDL)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip
