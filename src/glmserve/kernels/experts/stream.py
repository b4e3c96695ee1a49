# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""The block-fp8 FFN of a routed layer as one persistent launch on Hopper, in Gluon; `fused` is its
plain form, and that of sizes which `serves` does not name.

A program a multiprocessor. One warp streams weights by TMA, gate_up's and behind them down's, as
far ahead as the ring of stages reaches; another brings rows, and waits first where they are what
other programs of this launch make; two warpgroups multiply. So neither the end of an item nor the
step from gate_up to down stops the stream. Sums have the order of the plain form, bit for bit.

A tile is N rows of one expert. Up to 32 rows it is the step's rows as they are, those of others
among them; more are gathered first (the shared expert has them in order). Positions: the pairs in
their order, then, from `spare` on, the rows of the shared expert, whose tiles come behind the
routed ones. All programs must be on the card at once: they wait for each other.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..gluon_common import let_next_start, step, wait_for_previous
from ..linear.hopper import DEPTH
from .stream_order import TILE, bring_rows, down_item, down_tile, plan, stream_weights, unit_of

BLOCKS = gl.constexpr(16)  # blocks whose scales are fetched at once
MOST_CHUNKS = gl.constexpr(4)  # of a sum


@gluon.jit
def _places(order, begin, end, gathered, TOP_K: gl.constexpr, N: gl.constexpr):
    """Position of each of the tile's N columns in the order of the pairs, -1: none."""
    SQUARE: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [8, 1], [1, 0])
    i = begin + gl.arange(0, N, layout=gl.SliceLayout(1, SQUARE))
    n = gl.arange(0, N, layout=gl.SliceLayout(0, SQUARE))
    straight = gl.where(begin + n < end, begin + n, -1)
    if N > 32:  # such tiles are gathered
        return straight
    row = gl.load(order + i, mask=(i < end) & (gathered == 0), other=-1) // TOP_K
    same = (row[:, None] == n[None, :]) & (i < end)[:, None]
    here = gl.max(gl.where(same, i[:, None], -1), 0)
    return gl.where(gathered != 0, straight, here)


@gluon.jit
def _activate(gate, up, place, group, hidden, hidden_scales, inner, stride, N: gl.constexpr):
    """Group `group` of quantise(silu(gate) * up), sums [128, N] in fp32, as `fused._activate`."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, N, 32])
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [16, 2], [1, 8], [0, 1])
    gate = gate.to(gl.bfloat16).to(gl.float32)
    up = up.to(gl.bfloat16).to(gl.float32)
    product = gate * (1.0 / (1.0 + gl.exp(-gate))) * up
    product = product.to(gl.bfloat16).to(gl.float32)
    scale = gl.maximum(gl.max(gl.abs(product), 0) * (1.0 / 448.0), 1e-30)
    one = gl.full([N], 1.0, gl.float32, gl.SliceLayout(0, MMA))
    quantised = (product * gl.div_rn(one, scale)[None, :]).to(gl.float8e4nv)
    wide = gl.convert_layout(quantised, OUT)
    at = gl.convert_layout(place, gl.SliceLayout(0, OUT))
    column = group * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(1, OUT))
    gl.store(
        hidden + at[None, :].to(gl.int64) * inner + column[:, None], wide,
        mask=(at >= 0)[None, :] & (column >= 0)[:, None],
    )  # fmt: skip
    at = gl.convert_layout(place, gl.SliceLayout(0, MMA))
    gl.store(hidden_scales + group * stride + at, scale, mask=at >= 0)


@gluon.jit
def _gate_up(
    row_scales, row_stride, row, gate_line, up_line, first, per, w_tiles, x_tiles, full, empty,
    scales, stage, phase, N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One chunk: (gate, up sums [128, N]) of `per` blocks from `first` on, rows from `row` on."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, N, 32])
    FETCH: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [8, 1], [1, 0])
    ahead = gl.arange(0, BLOCKS, layout=gl.SliceLayout(1, FETCH))
    n = gl.arange(0, N, layout=gl.SliceLayout(0, FETCH))
    at = gl.minimum(first + ahead, first + per - 1)
    n = gl.minimum(row + n, row_stride - 1)
    rows = gl.load(row_scales + at[:, None] * row_stride + n[None, :])
    gate_scale = gl.load(gate_line + at)
    up_scale = gl.load(up_line + at)
    lines = scales._reinterpret(gl.float32, [2 * BLOCKS, N], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    scales.index(0).store(gate_scale[:, None] * rows)
    scales.index(1).store(up_scale[:, None] * rows)
    gate = gl.zeros([TILE, N], gl.float32, MMA)
    up = gl.zeros([TILE, N], gl.float32, MMA)
    none = gl.zeros([TILE, N], gl.float32, MMA)
    for block in range(per):
        mbarrier.wait(full.index(stage), phase)
        rows_tile = x_tiles.index(2 * stage).permute((1, 0))
        if N <= 32:
            one = warpgroup_mma(
                w_tiles.index(2 * stage), rows_tile, none, use_acc=False, is_async=True
            )
            two = warpgroup_mma(
                w_tiles.index(2 * stage + 1), rows_tile, none, use_acc=False, is_async=True
            )
            one_scale = lines.index(block).load(gl.SliceLayout(0, MMA))
            two_scale = lines.index(BLOCKS + block).load(gl.SliceLayout(0, MMA))
            one, two = warpgroup_mma_wait(0, deps=[one, two])
            mbarrier.arrive(empty.index(stage))
            gate += one * one_scale[None, :]
            up += two * two_scale[None, :]
        else:  # registers for one product at a time
            one = warpgroup_mma(
                w_tiles.index(2 * stage), rows_tile, none, use_acc=False, is_async=True
            )
            one_scale = lines.index(block).load(gl.SliceLayout(0, MMA))
            one = warpgroup_mma_wait(0, deps=[one])
            gate += one * one_scale[None, :]
            two = warpgroup_mma(
                w_tiles.index(2 * stage + 1), rows_tile, none, use_acc=False, is_async=True
            )
            two_scale = lines.index(BLOCKS + block).load(gl.SliceLayout(0, MMA))
            two = warpgroup_mma_wait(0, deps=[two])
            mbarrier.arrive(empty.index(stage))
            up += two * two_scale[None, :]
        stage, phase = step(stage, phase, STAGES)
    return gate, up, stage, phase


@gluon.jit
def _down(
    hidden_scales, stride, line, row, blocks, w_tiles, x_tiles, full, empty, scales, stage, phase,
    N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Sum [128, N] over all blocks, two a stage."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, N, 32])
    FETCH: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [8, 1], [1, 0])
    ahead = gl.arange(0, BLOCKS, layout=gl.SliceLayout(1, FETCH))
    n = gl.arange(0, N, layout=gl.SliceLayout(0, FETCH))
    lines = scales._reinterpret(gl.float32, [2 * BLOCKS, N], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    acc = gl.zeros([TILE, N], gl.float32, MMA)
    none = gl.zeros([TILE, N], gl.float32, MMA)
    for first in range(0, blocks, BLOCKS):
        at = gl.minimum(first + ahead, blocks - 1)
        weight_scale = gl.load(line + at)
        # Once its rows are here, their scales are in memory too.
        mbarrier.wait(full.index(stage), phase)
        rows = gl.load(
            hidden_scales + at[:, None] * stride + (row + n)[None, :], cache_modifier=".cg"
        )
        scales.index(0).store(weight_scale[:, None] * rows)
        for block in range(0, gl.minimum(blocks - first, BLOCKS), 2):
            mbarrier.wait(full.index(stage), phase)
            one = warpgroup_mma(
                w_tiles.index(2 * stage), x_tiles.index(2 * stage).permute((1, 0)), none,
                use_acc=False, is_async=True,
            )  # fmt: skip
            two = warpgroup_mma(
                w_tiles.index(2 * stage + 1), x_tiles.index(2 * stage + 1).permute((1, 0)), none,
                use_acc=False, is_async=True,
            )  # fmt: skip
            one_scale = lines.index(block).load(gl.SliceLayout(0, MMA))
            two_scale = lines.index(block + 1).load(gl.SliceLayout(0, MMA))
            one, two = warpgroup_mma_wait(0, deps=[one, two])
            mbarrier.arrive(empty.index(stage))
            acc += one * one_scale[None, :]
            acc += two * two_scale[None, :]
            stage, phase = step(stage, phase, STAGES)
    return acc, stage, phase


@gluon.jit
def _combine(
    parts, place, weights, out, rows, spare, width, column, TOP_K: gl.constexpr,
):  # fmt: skip
    """`fused._weighted` for one block of columns and all rows."""
    LINE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0])
    n = column * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(0, LINE))
    for start in range(0, rows, 16):
        row = start + gl.arange(0, 16, layout=gl.SliceLayout(1, LINE))
        real = row < rows
        wanted = real[:, None] & (n >= 0)[None, :]
        total = gl.load(
            parts + (spare + row)[:, None].to(gl.int64) * width + n[None, :], mask=wanted,
            other=0.0, cache_modifier=".cg",
        ).to(gl.float32)  # fmt: skip
        for slot in gl.static_range(TOP_K):
            position = gl.load(place + row * TOP_K + slot, mask=real, other=-1)
            share = gl.load(weights + row * TOP_K + slot, mask=real, other=0.0)
            value = gl.load(
                parts + position[:, None].to(gl.int64) * width + n[None, :],
                mask=wanted & (position >= 0)[:, None], other=0.0, cache_modifier=".cg",
            ).to(gl.float32)  # fmt: skip
            total += value * share[:, None]
        gl.store(
            out + row[:, None].to(gl.int64) * width + n[None, :], total.to(gl.bfloat16), mask=wanted
        )


@gluon.jit
def _consume(
    x_scales, taken_scales, taken_stride, up_scales, down_scales, s_up_scales, s_down_scales,
    order, tile_expert, tile_begin, tile_end, tile_count, done, tickets, column_tickets, partial,
    hidden,
    hidden_scales, stride, parts, place, weights, out, most_tiles, rows, spare, inner,
    shared_inner, width, depth, chunks, per, run_up, run_down, gathered, combine, early_whole,
    early_split, w_tiles, x_tiles, full, empty, scales, TOP_K: gl.constexpr, N: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, N, 32])
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [16, 2], [1, 8], [0, 1])
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    wait_for_previous()
    tiles, all_tiles, units, each, down = plan(
        tile_count, most_tiles, rows, inner, shared_inner, width, run_up, run_down, chunks, N
    )
    blocks = depth // DEPTH
    stage = 0
    phase = 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        item, chunk, tile, group = unit_of(unit, units, each, chunks, tiles, inner, shared_inner)
        gate_line = s_up_scales + group * blocks
        up_line = gate_line + (shared_inner // TILE) * blocks
        begin = spare + (tile - tiles) * N
        end = spare + rows
        row = (tile - tiles) * N
        row_scales = x_scales
        row_stride = rows
        direct = 1
        if tile < tiles:
            expert = gl.load(tile_expert + tile)
            gate_line = up_scales + (expert * (2 * inner // TILE) + group) * blocks
            up_line = gate_line + (inner // TILE) * blocks
            begin = gl.load(tile_begin + tile)
            end = gl.load(tile_end + tile)
            direct = gathered
            row = begin * gathered
            row_scales = taken_scales
            row_stride = taken_stride
        gate = gl.zeros([TILE, N], gl.float32, MMA)
        up = gl.zeros([TILE, N], gl.float32, MMA)
        for c in range(chunk, chunk + each):
            some_gate, some_up, stage, phase = _gate_up(
                row_scales, row_stride, row, gate_line, up_line, c * per, per, w_tiles, x_tiles,
                full, empty, scales, stage, phase, N, STAGES,
            )  # fmt: skip
            gate += some_gate
            up += some_up
        here = _places(order, begin, end, direct, TOP_K, N)
        finished = 1
        if N <= 32:
            if each < chunks:
                m = gl.arange(0, TILE, layout=gl.SliceLayout(1, MMA))
                n = gl.arange(0, N, layout=gl.SliceLayout(0, MMA))
                SIZE: gl.constexpr = TILE * N
                mine = partial + item * chunks * 2 * SIZE + m[:, None] + n[None, :] * TILE
                gl.store(mine + chunk * 2 * SIZE, gate)
                gl.store(mine + (chunk * 2 + 1) * SIZE, up)
                gl.thread_barrier()
                if gl.atomic_add(tickets + item, 1, sem="acq_rel") == chunks - 1:
                    gl.store(tickets + item, 0)
                    gate = gl.load(mine, cache_modifier=".cg")
                    up = gl.load(mine + SIZE, cache_modifier=".cg")
                    # Unrolled, so that no chunk's load waits for the sum before it.
                    for other in gl.static_range(1, MOST_CHUNKS):
                        there = (other < chunks) & (m[:, None] >= 0) & (n[None, :] >= 0)
                        more = mine + other * 2 * SIZE
                        more_gate = gl.load(more, mask=there, other=0.0, cache_modifier=".cg")
                        more_up = gl.load(more + SIZE, mask=there, other=0.0, cache_modifier=".cg")
                        gate = gl.where(there, gate + more_gate, gate)
                        up = gl.where(there, up + more_up, up)
                else:
                    finished = 0
        if finished != 0:
            _activate(gate, up, here, group, hidden, hidden_scales, inner, stride, N)
            gl.thread_barrier()
            gl.atomic_add(done + tile, 1, sem="acq_rel")
    early = early_split
    if each == chunks:
        early = early_whole
    turn = 0
    item = down_item(turn, units, early)
    columns = width // TILE
    while item < down:
        tile, column = down_tile(item, columns, tiles, all_tiles, each, chunks)
        line = s_down_scales + column * (shared_inner // DEPTH)
        begin = spare + (tile - tiles) * N
        end = spare + rows
        length = shared_inner // DEPTH
        if tile < tiles:
            expert = gl.load(tile_expert + tile)
            begin = gl.load(tile_begin + tile)
            end = gl.load(tile_end + tile)
            length = inner // DEPTH
            line = down_scales + (expert * columns + column) * length
        acc, stage, phase = _down(
            hidden_scales, stride, line, begin, length, w_tiles, x_tiles, full, empty, scales,
            stage, phase, N, STAGES,
        )  # fmt: skip
        wide = gl.convert_layout(acc.to(gl.bfloat16), OUT)
        position = begin + gl.arange(0, N, layout=gl.SliceLayout(0, OUT))
        n = column * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(1, OUT))
        gl.store(
            parts + position[None, :].to(gl.int64) * width + n[:, None], wide,
            mask=(position < end)[None, :] & (n >= 0)[:, None],
        )  # fmt: skip
        if combine != 0:
            gl.thread_barrier()
            if gl.atomic_add(column_tickets + column, 1, sem="acq_rel") == all_tiles - 1:
                gl.store(column_tickets + column, 0)
                _combine(parts, place, weights, out, rows, spare, width, column, TOP_K)
        turn += 1
        item = down_item(turn, units, early)
    # The last program puts the counters back.
    gl.thread_barrier()
    if gl.atomic_add(done - 1, 1, sem="acq_rel") == gl.num_programs(0) - 1:
        for start in range(-1, all_tiles, 256):
            i = start + gl.arange(0, 256, layout=FLAT)
            gl.store(done + i, gl.zeros([256], gl.int32, FLAT), mask=i < all_tiles)


@gluon.jit(
    do_not_specialize=[
        "taken_stride", "stride", "most_tiles", "rows", "spare", "run_up", "run_down", "gathered",
        "combine", "chunks", "per", "early_whole", "early_split", "shared_inner",
    ]
)  # fmt: skip
def ffn(
    x, x_scales, taken, taken_scales, w_up, up_scales, w_down, down_scales, s_up, s_up_scales,
    s_down, s_down_scales, hidden_box, hidden, hidden_scales, order, tile_expert, tile_begin,
    tile_end, tile_count, done, tickets, column_tickets, partial, parts, place, weights, out,
    taken_stride, stride, most_tiles, rows, spare, inner, shared_inner, width, depth, chunks, per,
    run_up, run_down, gathered, combine, early_whole, early_split, TOP_K: gl.constexpr,
    N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """out [rows, width] where `combine`, else parts [positions, width].

    x, taken, w_up, w_down, s_up, s_down, hidden_box are descriptors; `taken` are the pairs' rows
    where `gathered`, else x itself. done (after a slot for the programs), tickets and
    column_tickets are 0 before and after.
    """
    let_next_start()
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    x_tiles = gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES, N, DEPTH], SHARED)
    w_tiles = gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES, TILE, DEPTH], SHARED)
    scales = gl.allocate_shared_memory(
        gl.float32, [2, BLOCKS, N], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=2)
        mbarrier.init(empty.index(stage), count=1)
    gl.warp_specialize([
        (_consume, (
            x_scales, taken_scales, taken_stride, up_scales, down_scales, s_up_scales,
            s_down_scales, order, tile_expert, tile_begin, tile_end, tile_count, done, tickets,
            column_tickets, partial, hidden, hidden_scales, stride, parts, place, weights, out,
            most_tiles, rows, spare, inner, shared_inner, width, depth, chunks, per, run_up,
            run_down, gathered, combine, early_whole, early_split, w_tiles, x_tiles, full, empty,
            scales, TOP_K, N, STAGES)),
        (stream_weights, (
            w_up, w_down, s_up, s_down, tile_count, tile_expert, most_tiles, rows, inner,
            shared_inner, width, depth, chunks, per, run_up, run_down, early_whole, early_split,
            w_tiles, full, empty, N, STAGES)),
        (bring_rows, (
            x, taken, hidden_box, tile_count, tile_begin, done, most_tiles, rows, spare, inner,
            shared_inner, width, chunks, per, run_up, run_down, gathered, early_whole, early_split,
            x_tiles, full, empty, N, STAGES)),
    ], [1, 1], [24, 24])  # fmt: skip
