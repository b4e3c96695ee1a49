# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""(row, expert) pairs in expert order, and the tiles that a grouped product works through.

A program places one expert's pairs of one segment of BLOCK pairs: where they go follows from how
many pairs of which expert each segment has, so nothing is exchanged between programs and the order
is stable: within an expert, pairs ascend.
"""

import triton
import triton.language as tl

from ..triton_common import let_next_start, wait_for_previous


@triton.jit(do_not_specialize=["pairs", "first"])
def count_pairs(ids, counts, pairs, first, local, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """counts [segments, BINS] int32: pairs of each local expert in each segment of BLOCK pairs."""
    segment = tl.program_id(0)
    let_next_start()
    wait_for_previous()
    histogram = tl.histogram(_experts(ids, segment, pairs, first, local, BLOCK), BINS)
    tl.store(counts + segment * BINS + tl.arange(0, BINS), histogram)


@triton.jit(do_not_specialize=["pairs", "first", "block_m", "max_tiles"])
def sort_pairs(
    ids,
    counts,
    order,
    place,
    offsets,
    tile_expert,
    tile_begin,
    tile_end,
    tile_count,
    pairs,
    first,
    local,
    block_m,
    max_tiles,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    SEGMENTS: tl.constexpr,
):
    """Program (e < local, s) places the pairs of expert first + e in segment s, (local, s) others.

    ids [pairs] int64; counts from `count_pairs`, unless there is one segment only; order [pairs]
    int32, pairs by expert; place [pairs] int32, the inverse, -1 for other ranks' experts; offsets
    [local + 1] int32 into `order`; tile_expert, tile_begin, tile_end [max_tiles] int32: at most
    block_m places of `order` each, expert -1 beyond the last tile; tile_count [1]. BINS > local,
    SEGMENTS a power of two that covers them all.
    """
    mine = tl.program_id(0)
    segment = tl.program_id(1)
    bins = tl.arange(0, BINS)
    let_next_start()
    wait_for_previous()
    expert = _experts(ids, segment, pairs, first, local, BLOCK)
    if SEGMENTS == 1:
        total = tl.histogram(expert, BINS)
        earlier = 0
    else:
        segments = tl.arange(0, SEGMENTS)
        table = tl.load(
            counts + segments[:, None] * BINS + bins[None, :],
            mask=(segments < tl.num_programs(1))[:, None],
            other=0,
        )
        total = tl.sum(table, 0)
        before = (segments < segment)[:, None] & (bins == mine)[None, :]
        earlier = tl.sum(tl.sum(tl.where(before, table, 0), 1), 0)
    total = tl.where(bins < local, total, 0)
    base = tl.sum(tl.where(bins < mine, total, 0), 0)
    if segment == 0:
        heights = (total + block_m - 1) // block_m
        tile = tl.sum(tl.where(bins < mine, heights, 0), 0)
        tl.store(offsets + mine, base)
        if mine == local:
            tl.store(tile_count, tile)
            for start in range(0, max_tiles, BINS):
                unused = (start + bins >= tile) & (start + bins < max_tiles)
                tl.store(tile_expert + start + bins, -1, mask=unused)
        else:
            height = tl.sum(tl.where(bins == mine, heights, 0), 0)
            end = base + tl.sum(tl.where(bins == mine, total, 0), 0)
            for step in range(height):
                begin = base + step * block_m
                tl.store(tile_expert + tile + step, mine)
                tl.store(tile_begin + tile + step, begin)
                tl.store(tile_end + tile + step, tl.minimum(begin + block_m, end))
    pair = segment * BLOCK + tl.arange(0, BLOCK)
    chosen = (expert == mine) & (pair < pairs)
    if mine == local:
        tl.store(place + pair, -1, mask=chosen)
    else:
        ones = chosen.to(tl.int32)
        at = base + earlier + tl.cumsum(ones, 0) - ones
        tl.store(order + at, pair, mask=chosen)
        tl.store(place + pair, at, mask=chosen)


@triton.jit
def _experts(ids, segment, pairs, first, local, BLOCK: tl.constexpr):
    """Local numbers of a segment's experts; `local` stands for every expert that is not here."""
    pair = segment * BLOCK + tl.arange(0, BLOCK)
    number = tl.load(ids + pair, mask=pair < pairs, other=-1).to(tl.int32) - first
    return tl.where((number >= 0) & (number < local), number, local)
