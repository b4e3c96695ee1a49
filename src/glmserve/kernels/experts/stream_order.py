# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""What each program of `stream` works on and in which order, and the two warps that bring it.

Units of gate_up, then items of down, round robin over the programs; each is worked out from its
number, so that nothing is handed on. Weights come as far ahead as the ring of stages reaches. Rows
come behind them, those of down once the tile's gate_up is done, which other programs may do.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ..gluon_common import step, wait_for_previous
from ..linear.hopper import DEPTH

TILE = gl.constexpr(128)  # weight rows of a box, columns of a scale


@gluon.jit
def _fence_proxy():
    """What was acquired may be read by TMA."""
    gl.inline_asm_elementwise(
        "fence.proxy.async; fence.proxy.async.global; // $0",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _acquire(pointer):
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", [pointer], dtype=gl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@gluon.jit
def plan(
    tile_count, most_tiles, rows, inner, shared_inner, width, run_up, run_down, chunks,
    N: gl.constexpr,
):  # fmt: skip
    """(routed tiles, all tiles, gate_up's units, chunks of a unit, down's items)."""
    tiles = gl.minimum(gl.load(tile_count), most_tiles)
    shared = (rows + N - 1) // N
    if shared_inner == 0:
        shared = 0
    items = tiles * (inner // TILE) + shared * (shared_inner // TILE)
    programs = gl.num_programs(0)
    # A unit of whole sums where there are enough of them, else of one chunk.
    each = chunks
    units = items
    if N <= 32:
        if items < programs:
            each = 1
            units = items * chunks
    units = units * run_up
    down = (tiles + shared) * (width // TILE) * run_down
    return tiles, tiles + shared, units, each, down


@gluon.jit
def unit_of(unit, units, each, chunks, tiles, inner, shared_inner):
    """(item, its first chunk, tile, group) of a unit of gate_up."""
    ways = chunks // each
    item = unit // ways
    routed = tiles * (inner // TILE)
    if ways == 1:
        item = (item + routed) % units  # those of the shared expert first
    tile = item // (inner // TILE)
    group = item % (inner // TILE)
    if item >= routed:
        tile = tiles + (item - routed) // (shared_inner // TILE)
        group = (item - routed) % (shared_inner // TILE)
    return item, unit % ways * each, tile, group


@gluon.jit
def down_item(turn, units, early_items):
    """The turn-th item of down of this program: who has a unit of gate_up less begins sooner."""
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    late = units % programs
    early = programs - late
    if late == 0:
        early = 0
    item = early * early_items + programs * turn + program
    if (early > 0) & (program >= late):
        if turn < early_items:
            item = early * turn + program - late
        else:
            item = early * early_items + programs * (turn - early_items) + program
    return item


@gluon.jit
def down_tile(item, columns, tiles, all_tiles, each, chunks):
    """(tile, column) of an item of down. The shared expert's items are short, so that multiplying
    lags behind the stream: they come first where there is time to make that up."""
    tile = item // columns
    if each == chunks:
        tile = (tile + tiles) % all_tiles
    return tile, item % columns


@gluon.jit
def stream_weights(
    w_up, w_down, s_up, s_down, tile_count, tile_expert, most_tiles, rows, inner, shared_inner,
    width, depth, chunks, per, run_up, run_down, early_whole, early_split, w_tiles, full, empty,
    N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    wait_for_previous()
    # Where units are chunks this is the first one's tile: no need to know their number first.
    near = gl.minimum(gl.program_id(0) // (chunks * (inner // TILE)), most_tiles - 1)
    guess = gl.load(tile_expert + near)
    tiles, all_tiles, units, each, down = plan(
        tile_count, most_tiles, rows, inner, shared_inner, width, run_up, run_down, chunks, N
    )
    stage = 0
    phase = 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        item, chunk, tile, group = unit_of(unit, units, each, chunks, tiles, inner, shared_inner)
        if tile < tiles:
            expert = guess
            if tile != near:
                expert = gl.load(tile_expert + tile)
            line = expert * (2 * inner) + group * TILE
            for block in range(chunk * per, (chunk + each) * per):
                mbarrier.wait(empty.index(stage), phase ^ 1)
                barrier = full.index(stage)
                mbarrier.expect(barrier, 2 * TILE * DEPTH)
                tma.async_copy_global_to_shared(
                    w_up, [line, block * DEPTH], barrier, w_tiles.index(2 * stage)
                )
                tma.async_copy_global_to_shared(
                    w_up, [line + inner, block * DEPTH], barrier, w_tiles.index(2 * stage + 1)
                )
                stage, phase = step(stage, phase, STAGES)
        else:
            line = group * TILE
            for block in range(chunk * per, (chunk + each) * per):
                mbarrier.wait(empty.index(stage), phase ^ 1)
                barrier = full.index(stage)
                mbarrier.expect(barrier, 2 * TILE * DEPTH)
                tma.async_copy_global_to_shared(
                    s_up, [line, block * DEPTH], barrier, w_tiles.index(2 * stage)
                )
                tma.async_copy_global_to_shared(
                    s_up, [line + shared_inner, block * DEPTH], barrier,
                    w_tiles.index(2 * stage + 1),
                )  # fmt: skip
                stage, phase = step(stage, phase, STAGES)
    early = early_split
    if each == chunks:
        early = early_whole
    turn = 0
    item = down_item(turn, units, early)
    columns = width // TILE
    while item < down:
        tile, column = down_tile(item, columns, tiles, all_tiles, each, chunks)
        if tile < tiles:
            line = gl.load(tile_expert + tile) * width + column * TILE
            for pair in range(inner // (2 * DEPTH)):
                mbarrier.wait(empty.index(stage), phase ^ 1)
                barrier = full.index(stage)
                mbarrier.expect(barrier, 2 * TILE * DEPTH)
                tma.async_copy_global_to_shared(
                    w_down, [line, 2 * pair * DEPTH], barrier, w_tiles.index(2 * stage)
                )
                tma.async_copy_global_to_shared(
                    w_down, [line, (2 * pair + 1) * DEPTH], barrier, w_tiles.index(2 * stage + 1)
                )
                stage, phase = step(stage, phase, STAGES)
        else:
            line = column * TILE
            for pair in range(shared_inner // (2 * DEPTH)):
                mbarrier.wait(empty.index(stage), phase ^ 1)
                barrier = full.index(stage)
                mbarrier.expect(barrier, 2 * TILE * DEPTH)
                tma.async_copy_global_to_shared(
                    s_down, [line, 2 * pair * DEPTH], barrier, w_tiles.index(2 * stage)
                )
                tma.async_copy_global_to_shared(
                    s_down, [line, (2 * pair + 1) * DEPTH], barrier, w_tiles.index(2 * stage + 1)
                )
                stage, phase = step(stage, phase, STAGES)
        turn += 1
        item = down_item(turn, units, early)


@gluon.jit
def bring_rows(
    x, taken, hidden, tile_count, tile_begin, done, most_tiles, rows, spare, inner, shared_inner,
    width, chunks, per, run_up, run_down, gathered, early_whole, early_split, x_tiles, full, empty,
    N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    wait_for_previous()
    tiles, all_tiles, units, each, down = plan(
        tile_count, most_tiles, rows, inner, shared_inner, width, run_up, run_down, chunks, N
    )
    stage = 0
    phase = 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        _, chunk, tile, _ = unit_of(unit, units, each, chunks, tiles, inner, shared_inner)
        routed = tile < tiles
        row = (tile - tiles) * N
        if routed:
            row = gl.load(tile_begin + tile) * gathered
        for block in range(chunk * per, (chunk + each) * per):
            mbarrier.wait(empty.index(stage), phase ^ 1)
            barrier = full.index(stage)
            mbarrier.expect(barrier, N * DEPTH)
            place = x_tiles.index(2 * stage)
            tma.async_copy_global_to_shared(
                taken, [row, block * DEPTH], barrier, place, pred=routed
            )
            tma.async_copy_global_to_shared(
                x, [row, block * DEPTH], barrier, place, pred=tile >= tiles
            )
            stage, phase = step(stage, phase, STAGES)
    early = early_split
    if each == chunks:
        early = early_whole
    turn = 0
    item = down_item(turn, units, early)
    columns = width // TILE
    while item < down:
        tile, _ = down_tile(item, columns, tiles, all_tiles, each, chunks)
        row = spare + (tile - tiles) * N
        need = shared_inner // TILE
        if tile < tiles:
            row = gl.load(tile_begin + tile)
            need = inner // TILE
        pairs = need // 2
        if run_up != 0:
            finished = _acquire(done + tile)
            while finished < need:  # all programs run at once, and none waits before its gate_up
                finished = _acquire(done + tile)
            _fence_proxy()
        for pair in range(pairs):
            mbarrier.wait(empty.index(stage), phase ^ 1)
            barrier = full.index(stage)
            mbarrier.expect(barrier, 2 * N * DEPTH)
            tma.async_copy_global_to_shared(
                hidden, [row, 2 * pair * DEPTH], barrier, x_tiles.index(2 * stage)
            )
            tma.async_copy_global_to_shared(
                hidden, [row, (2 * pair + 1) * DEPTH], barrier, x_tiles.index(2 * stage + 1)
            )
            stage, phase = step(stage, phase, STAGES)
        turn += 1
        item = down_item(turn, units, early)
