# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""(row, expert) pairs in expert order, and the tiles that a grouped product works through.

One program an expert scans all pairs, so nothing is exchanged between programs and the order is
stable: within an expert, pairs ascend.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["pairs", "first", "block_m", "max_tiles"])
def sort_pairs(
    ids,
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
):
    """Program e < local places the pairs of expert first + e, program `local` all others.

    ids [pairs] int64; order [pairs] int32, pairs by expert; place [pairs] int32, the inverse, -1
    for other ranks' experts; offsets [local + 1] int32 into `order`; tile_expert, tile_begin,
    tile_end [max_tiles] int32: at most block_m places of `order` each, expert -1 beyond the last
    tile; tile_count [1]. BINS > local.
    """
    mine = tl.program_id(0)
    bins = tl.arange(0, BINS)
    lane = tl.arange(0, BLOCK)
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, pairs, BLOCK):
        pair = start + lane
        expert = _local(tl.load(ids + pair, mask=pair < pairs, other=-1), first, local)
        counts += tl.histogram(expert, BINS)  # bin `local`: pairs of other ranks, and none
    counts = tl.where(bins < local, counts, 0)
    base = tl.sum(tl.where(bins < mine, counts, 0), 0)
    heights = (counts + block_m - 1) // block_m
    tile = tl.sum(tl.where(bins < mine, heights, 0), 0)
    tl.store(offsets + mine, base)
    if mine == local:
        tl.store(tile_count, tile)
        for start in range(0, max_tiles, BINS):
            tl.store(
                tile_expert + start + bins,
                -1,
                mask=(start + bins >= tile) & (start + bins < max_tiles),
            )
    else:
        height = tl.sum(tl.where(bins == mine, heights, 0), 0)
        end = base + tl.sum(tl.where(bins == mine, counts, 0), 0)
        for step in range(height):
            tl.store(tile_expert + tile + step, mine)
            tl.store(tile_begin + tile + step, base + step * block_m)
            tl.store(tile_end + tile + step, tl.minimum(base + step * block_m + block_m, end))
    for start in range(0, pairs, BLOCK):
        pair = start + lane
        inside = pair < pairs
        expert = _local(tl.load(ids + pair, mask=inside, other=-1), first, local)
        chosen = (expert == mine) & inside
        if mine == local:
            tl.store(place + pair, -1, mask=chosen)
        else:
            ones = chosen.to(tl.int32)
            at = base + tl.cumsum(ones, 0) - ones
            tl.store(order + at, pair, mask=chosen)
            tl.store(place + pair, at, mask=chosen)
            base += tl.sum(ones, 0)


@triton.jit
def _local(ids, first, local):
    """Expert ids to local numbers; `local` stands for every expert that is not here."""
    number = ids.to(tl.int32) - first
    return tl.where((number >= 0) & (number < local), number, local)
