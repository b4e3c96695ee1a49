# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""The block-fp8 FFN of a routed layer in two launches: gate_up with SwiGLU and quantisation behind
it, then down with the weighted sum behind it; the shared expert's columns go along in both.

A sum's K chunks and roundings are those of the separate kernels (`kernel`, `linear`, `swiglu`), so
a row has the same bits here and there. Work that several programs share is finished by the one
that comes last, in a fixed order; tickets are 0 before and after.
"""

import triton
import triton.language as tl

from ..linear.kernel import chunk_product
from ..quantise.kernel import quantise_groups
from ..triton_common import let_next_start, prefetch, to_bf16, wait_for_previous

GROUP = tl.constexpr(128)  # columns of a scale
HALF = tl.constexpr(64)  # gate columns of an item, and as many up columns
SUBS = tl.constexpr(2)  # items of a group


@triton.jit
def _gate_and_up(
    x, x_line, x_stride, weight, gate_line, up_line, is_gate, begin, end, real,
    BN: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`linear.kernel.chunk_product` over a tile of BN / 2 gate rows, then as many up rows."""
    acc = tl.zeros([BN, BM], tl.float32)
    rows_scale = tl.load(x_line + begin * x_stride, mask=real, other=0.0)
    gate_scale = tl.load(gate_line + begin)
    up_scale = tl.load(up_line + begin)
    for block in tl.range(begin, end, num_stages=STAGES):
        w_tile = tl.load(weight + block * GROUP)
        x_tile = tl.load(x + block * GROUP, mask=real[:, None], other=0.0)
        after = tl.minimum(block + 1, end - 1)
        next_rows = tl.load(x_line + after * x_stride, mask=real, other=0.0)
        next_gate = tl.load(gate_line + after)
        next_up = tl.load(up_line + after)
        scale = tl.where(is_gate, gate_scale, up_scale)
        acc += tl.dot(w_tile, x_tile.T) * (scale[:, None] * rows_scale[None, :])
        rows_scale = next_rows
        gate_scale = next_gate
        up_scale = next_up
    return acc


@triton.jit
def _activate(gate, up, out, scales, group, inner, stride, position, real):
    """Group `group` of quantise(silu(gate) * up) of some rows, from sums [BM, 128] in fp32."""
    gate = to_bf16(gate).to(tl.float32)
    up = to_bf16(up).to(tl.float32)
    quantised, scale = quantise_groups(to_bf16(gate * tl.sigmoid(gate) * up).to(tl.float32))
    column = group * GROUP + tl.arange(0, GROUP)
    target = out + position[:, None].to(tl.int64) * inner + column[None, :]
    tl.store(target, quantised, mask=real[:, None])
    tl.store(scales + group * stride + position, scale, mask=real)


@triton.jit
def _up_item(
    x, x_scales, x_rows, row, position, real, weight, weight_scales, first_row, first_line, inner,
    depth, chunks, group, sub, chunk, partial, stride, ticket, out, scales,
    BM: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """HALF gate and up columns of one tile of rows; SPLIT: of one K chunk, else of all. Programs
    that share a group of 128 columns leave their sums, and the last one of them finishes it.

    first_row, first_line: of the expert in weight [.., depth] and weight_scales [.., depth / 128].
    partial [chunks or 1, stride, 2 inner] by position; out, scales as `QuantRows` of `stride` rows.
    """
    blocks = depth // GROUP
    per = tl.cdiv(blocks, chunks)
    line = tl.arange(0, 2 * HALF)
    is_gate = line < HALF
    column = group * GROUP + sub * HALF + line % HALF
    n = tl.where(is_gate, column, inner + column).to(tl.int64)
    k = tl.arange(0, GROUP)
    x_tile = x + row[:, None] * depth + k[None, :]
    w_tile = weight + (first_row + n)[:, None] * depth + k[None, :]
    gate_line = weight_scales + (first_line + group) * blocks
    up_line = gate_line + (inner // GROUP) * blocks
    x_line = x_scales + row
    ways = 1
    if SPLIT:
        ways = chunks
        begin = chunk * per
        acc = _gate_and_up(
            x_tile, x_line, x_rows, w_tile, gate_line, up_line, is_gate, begin,
            tl.minimum(begin + per, blocks), real, 2 * HALF, BM, STAGES,
        )  # fmt: skip
    else:
        acc = tl.zeros([2 * HALF, BM], tl.float32)
        for begin in tl.range(0, blocks, per):
            acc += _gate_and_up(
                x_tile, x_line, x_rows, w_tile, gate_line, up_line, is_gate, begin,
                tl.minimum(begin + per, blocks), real, 2 * HALF, BM, STAGES,
            )  # fmt: skip
    base = partial + position.to(tl.int64) * (2 * inner)
    step = stride.to(tl.int64) * (2 * inner)
    tl.store(base[None, :] + chunk * step + n[:, None], acc, mask=real[None, :])
    tl.debug_barrier()  # every thread's partials before the ticket
    last = ways * SUBS - 1
    if tl.atomic_add(ticket, 1, sem="acq_rel") == last:
        tl.store(ticket, 0)
        at = base[:, None] + (group * GROUP + k)[None, :]
        some = real[:, None]
        gate = tl.load(at, mask=some, other=0.0, cache_modifier=".cg")
        up = tl.load(at + inner, mask=some, other=0.0, cache_modifier=".cg")
        for other in tl.range(1, ways):
            gate += tl.load(at + other * step, mask=some, other=0.0, cache_modifier=".cg")
            up += tl.load(at + other * step + inner, mask=some, other=0.0, cache_modifier=".cg")
        _activate(gate, up, out, scales, group, inner, stride, position, real)


@triton.jit
def _tile(tile_expert, tile_begin, tile_end, tile, most_tiles):
    """(expert, first and last position) of a tile; expert -1 beyond the last."""
    there = tile < most_tiles
    expert = tl.load(tile_expert + tile, mask=there, other=-1)
    begin = tl.load(tile_begin + tile, mask=there, other=0)
    return expert, begin, tl.load(tile_end + tile, mask=there, other=0)


@triton.jit
def _fetch_tile(weight, group, sub, chunk, span, inner, depth):
    """Asks for the first 2 KB of each row of an item's weight to be brought to L2."""
    line = tl.arange(0, 2 * HALF)
    column = group * GROUP + sub * HALF + line % HALF
    n = tl.where(line < HALF, column, inner + column)
    far = tl.arange(0, 16) * GROUP
    at = weight + n[:, None].to(tl.int64) * depth + chunk * span + far[None, :]
    prefetch(at, (far < span)[None, :] & (n >= 0)[:, None])


@triton.jit(
    do_not_specialize=[
        "rows", "pairs", "most_tiles", "chunks", "shared_chunks", "shared_programs", "shared_slots"
    ]
)  # fmt: skip
def gate_up_activated(
    x, x_scales, weight, weight_scales, shared_weight, shared_scales, shared_down,
    order, tile_expert, tile_begin, tile_end, tile_count, tickets,
    partial, out, out_scales, shared_partial, shared_out, shared_out_scales,
    rows, pairs, inner, shared_inner, depth, chunks, shared_chunks, shared_programs, shared_slots,
    most_tiles, TOP_K: tl.constexpr, BM: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The first `shared_programs` programs take one item of the shared expert each (none where it
    is computed elsewhere; blocks of BM rows, `shared_slots` tickets), then all walk through those
    of the routed tiles.

    x as `QuantRows` [rows, depth]; weight [E, 2 inner, depth], shared_weight [2 shared_inner,
    depth] with their block scales; out as `QuantRows` of the pairs in `order`, shared_out of rows.
    """
    ways = 1
    shared_ways = 1
    if SPLIT:
        ways = chunks
        shared_ways = shared_chunks
    m = tl.arange(0, BM)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    shared_groups = shared_inner // GROUP
    shared_chunk = program % shared_ways
    shared_sub = program // shared_ways % SUBS
    shared_slot = program // (shared_ways * SUBS)
    if program < shared_programs:
        # The shared expert's weights depend on nothing: this program's part of down, and its tile.
        _fetch_tile(
            shared_weight, shared_slot % shared_groups, shared_sub, shared_chunk,
            tl.cdiv(depth, shared_ways), shared_inner, depth,
        )  # fmt: skip
        total = depth * shared_inner // GROUP  # lines of down
        share = tl.cdiv(total, shared_programs)
        for start in tl.range(0, share, 512):
            own = start + tl.arange(0, 512)
            far_line = program * share + own
            prefetch(shared_down + far_line * GROUP, (own < share) & (far_line < total))
    wait_for_previous()
    let_next_start()  # not before: who starts may look at the tiles
    groups = inner // GROUP
    each = groups * SUBS * ways  # items of a tile
    tiles = tl.load(tile_count)
    # The programs of the shared expert come to the routed ones last.
    first = (program + programs - shared_programs) % programs
    expert, begin, end = _tile(tile_expert, tile_begin, tile_end, first // each, most_tiles)
    if program < shared_programs:
        position = shared_slot // shared_groups * BM + m
        real = position < rows
        row = tl.where(real, position, 0).to(tl.int64)
        _up_item(
            x, x_scales, rows, row, position, real, shared_weight, shared_scales, 0, 0,
            shared_inner, depth, shared_chunks, shared_slot % shared_groups, shared_sub,
            shared_chunk, shared_partial, rows, tickets + shared_slot, shared_out,
            shared_out_scales, BM, SPLIT, STAGES,
        )  # fmt: skip
    for item in tl.range(first, tiles * each, programs):
        chunk = item % ways
        sub = item // ways % SUBS
        slot = item // (ways * SUBS)
        position = begin + m
        real = position < end
        row = tl.load(order + position, mask=real, other=0) // TOP_K
        _up_item(
            x, x_scales, rows, row.to(tl.int64), position, real, weight, weight_scales,
            expert.to(tl.int64) * (2 * inner), expert * (2 * inner // GROUP), inner, depth,
            chunks, slot % groups, sub, chunk, partial, pairs,
            tickets + shared_slots + slot, out, out_scales, BM, SPLIT, STAGES,
        )  # fmt: skip
        after = (item + programs) // each
        expert, begin, end = _tile(tile_expert, tile_begin, tile_end, after, most_tiles)


@triton.jit
def _weighted(
    parts, shared, place, weights, out, rows, width, start, column, inside,
    TOP_K: tl.constexpr, RB: tl.constexpr,
):  # fmt: skip
    """`kernel.combine_rows` for rows [start, start + RB) and some columns."""
    row = start + tl.arange(0, RB)
    real = row < rows
    at = row[:, None].to(tl.int64) * width + column[None, :]
    wanted = real[:, None] & inside[None, :]
    total = tl.load(shared + at, mask=wanted, other=0.0, cache_modifier=".cg").to(tl.float32)
    for slot in tl.static_range(TOP_K):
        position = tl.load(place + row * TOP_K + slot, mask=real, other=-1).to(tl.int64)
        share = tl.load(weights + row * TOP_K + slot, mask=real, other=0.0)
        part = parts + position[:, None] * width + column[None, :]
        here = (position >= 0)[:, None] & wanted
        value = tl.load(part, mask=here, other=0.0, cache_modifier=".cg").to(tl.float32)
        total += value * share[:, None]
    tl.store(out + at, to_bf16(total), mask=wanted)


@triton.jit
def _down_tile(
    x, x_scales, stride, position, real, weight, weight_scales, first_row, first_line, target,
    width, depth, n, column, BN: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    blocks = depth // GROUP
    k = tl.arange(0, GROUP)
    row = tl.where(real, position, 0).to(tl.int64)
    x_tile = x + row[:, None] * depth + k[None, :]
    w_row = first_row + tl.minimum(n, width - 1).to(tl.int64)
    w_tile = weight + w_row[:, None] * depth + k[None, :]
    w_line = weight_scales + (first_line + column * BN // GROUP).to(tl.int64) * blocks
    acc = chunk_product(
        x_tile, x_scales + row, stride, w_tile, w_line, 0, blocks, real, BN, BM, GROUP, True,
        STAGES,
    )  # fmt: skip
    at = target + row[None, :] * width + n[:, None]
    tl.store(at, to_bf16(acc), mask=real[None, :] & (n < width)[:, None])


@triton.jit(do_not_specialize=["rows", "pairs", "shared_blocks", "most_tiles", "experts"])
def down_combined(
    x, x_scales, weight, weight_scales, shared_x, shared_x_scales, shared_weight, shared_scales,
    tile_expert, tile_begin, tile_end, tile_count, tickets, parts, shared, place, weights, out,
    rows, pairs, width, depth, shared_depth, shared_blocks, most_tiles, experts,
    TOP_K: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, COMBINE: tl.constexpr,
    RB: tl.constexpr, AHEAD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """parts [pairs, width] = the pairs' rows x times their expert's weight, shared [rows, width]
    likewise unless shared_blocks is 0 (then it is given). COMBINE (shared_blocks > 0): the program
    that finishes a block of BN columns writes out [rows, width].

    Items come by tiles, the shared expert's blocks of rows first.
    AHEAD: before it waits, a program fetches its first weight tile into L2.
    """
    columns = tl.cdiv(width, BN)
    m = tl.arange(0, BM)
    line = tl.arange(0, BN)
    first = tl.program_id(0)
    if AHEAD:
        # The tiles were made before the kernel that still runs; were they not, wrong lines of this
        # weight would be fetched.
        tile = first // columns - shared_blocks
        known = (tile >= 0) & (tile < most_tiles)
        expert = tl.load(tile_expert + tile, mask=known, other=-1, cache_modifier=".cg")
        if (expert >= 0) & (expert < experts):
            n = tl.minimum(first % columns * BN + line, width - 1)
            far = tl.arange(0, 16) * GROUP
            at = weight + (expert.to(tl.int64) * width + n)[:, None] * depth + far[None, :]
            prefetch(at, (far < depth)[None, :] & (n >= 0)[:, None])
    wait_for_previous()
    let_next_start()
    each = tl.load(tile_count) + shared_blocks
    expert, begin, end = _tile(
        tile_expert,
        tile_begin,
        tile_end,
        tl.maximum(first // columns - shared_blocks, 0),
        most_tiles,
    )
    for item in tl.range(first, columns * each, tl.num_programs(0)):
        column = item % columns
        tile = item // columns - shared_blocks
        n = column * BN + line
        if tile < 0:
            position = (tile + shared_blocks) * BM + m
            _down_tile(
                shared_x, shared_x_scales, rows, position, position < rows, shared_weight,
                shared_scales, 0, 0, shared, width, shared_depth, n, column, BN, BM, STAGES,
            )  # fmt: skip
        else:
            position = begin + m
            real = position < end
            _down_tile(
                x, x_scales, pairs, position, real, weight, weight_scales,
                expert.to(tl.int64) * width, expert * tl.cdiv(width, GROUP), parts, width, depth,
                n, column, BN, BM, STAGES,
            )  # fmt: skip
        if COMBINE:
            tl.debug_barrier()
            if tl.atomic_add(tickets + column, 1, sem="acq_rel") == each - 1:
                tl.store(tickets + column, 0)
                for start in tl.range(0, rows, RB):
                    _weighted(
                        parts, shared, place, weights, out, rows, width, start, n, n < width,
                        TOP_K, RB,
                    )  # fmt: skip
        after = tl.maximum((item + tl.num_programs(0)) // columns - shared_blocks, 0)
        expert, begin, end = _tile(tile_expert, tile_begin, tile_end, after, most_tiles)
