# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""Top-k of rows whose scores one CTA, or a cluster of them, holds in registers."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...gluon_common import let_next_start, wait_for_previous
from .cut import (
    BINS,
    FIRST_BIN,
    HIST,
    LIST,
    LISTED,
    ROOM,
    SUMS,
    VOTES,
    bin_of,
    clear,
    cut_again,
    find,
    finish,
    neighbours,
)
from .entries import cut4
from .parts import (
    NEAR_WORDS,
    count_place,
    declare,
    extremes,
    my_rank,
    no_more,
)


@gluon.jit(do_not_specialize=["first", "K"])
def select_near(
    logits, last, out, width, first, K,
    CTAS: gl.constexpr, TILES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Rows of up to CTAS * TILES * 128 WARPS positions, one to CTAS programs."""
    T: gl.constexpr = 32 * WARPS
    TILE: gl.constexpr = 4 * T
    ONE: gl.constexpr = neighbours(1, WARPS, CTAS)
    FOUR: gl.constexpr = neighbours(4, WARPS, CTAS)
    gl.static_assert(T >= ROOM)
    gl.static_assert(VOTES + 16 * TILES * WARPS <= 4 * NEAR_WORDS)
    let_next_start()
    words = declare(False)
    t = gl.arange(0, T, ONE)
    i4 = gl.arange(0, TILE, FOUR)
    lane = t % 32
    warp = t // 32
    clear(words, t, WARPS)
    row = gl.program_id(0)
    wait_for_previous()
    stop = gl.minimum(gl.load(last + row).to(gl.int32) + 1, width)
    line = logits + row.to(gl.int64) * width
    target = out + row.to(gl.int64) * K
    begin = stop * 0
    end = stop
    if CTAS > 1:
        share = ((stop + 127) // 128 + CTAS - 1) // CTAS * 128
        begin = my_rank() * share
        end = gl.minimum(begin + share, stop)
    low = gl.full([TILE], float("inf"), gl.float32, FOUR)
    high = gl.full([TILE], float("-inf"), gl.float32, FOUR)
    if CTAS > 1:
        # All look at the same sample of the whole row.
        at = ((i4 // 4).to(gl.int64) * stop // T).to(gl.int32) // 4 * 4 + i4 % 4
        sample = gl.load(line + at, mask=(at >= first) & (at < stop), other=float("nan"))
    raw = ()
    for tile in gl.static_range(TILES):
        if TILES <= 5:  # all at once, for which more would not have the registers
            position = begin + tile * TILE + i4
            there = (position < width) & (begin + tile * TILE < end)
            x = gl.load(line + position, mask=there, other=float("nan"))
        else:
            x = gl.full([TILE], float("nan"), gl.float32, FOUR)
            if begin + tile * TILE < end:
                position = begin + tile * TILE + i4
                x = gl.load(line + position, mask=position < width, other=float("nan"))
        raw += (x,)
    if CTAS > 1:
        low = gl.minimum(low, sample)
        high = gl.maximum(high, sample)
    xs = ()
    for tile in gl.static_range(TILES):
        x = raw[tile]
        from_ = begin + tile * TILE
        if (from_ < end) & ((from_ + TILE > end) | (from_ < first)):
            position = from_ + i4
            x = gl.where((position < end) & (position >= first), x, float("nan"))
        if CTAS == 1:
            if from_ < end:
                low = gl.minimum(low, x)
                high = gl.maximum(high, x)
        xs += (x,)
    # Edges of the bins.
    base, top = extremes(words + SUMS, low, high, lane, warp, WARPS)
    base = gl.maximum(base, -3.4028234663852886e38) * -0.25
    per_unit = 2047.0 / gl.maximum(base + top * 0.25, 1e-30)
    if CTAS > 1:
        per_unit *= 0.6666667  # the k-th may lie beyond the largest of a sample
    ys = ()
    for tile in gl.static_range(TILES):
        y = xs[tile]
        if begin + tile * TILE < end:
            y = bin_of(y, base, per_unit, CTAS)
            place = no_more(y.to(gl.int32, bitcast=True) - 0x4B000000, BINS)
            count_place(words + HIST + place * 4)
        ys += (y,)
    bin_, above, within = find(words, t, lane, warp, K, WARPS, CTAS)
    lost = top == float("inf")  # no bins: no width divides what lies below it
    if CTAS > 1:
        # Not all were sampled: some may lie below the first bin.
        lost = lost | ((bin_ < 0) & (stop > TILE))
    if lost:
        bin_ = bin_ * 0 - 1
        above = above * 0
    if (within > ROOM) | lost:
        above, within = cut_again(
            words, line, begin, end, first, -1, base, per_unit, bin_, above, K, t, i4, lane,
            warp, WARPS, CTAS,
        )  # fmt: skip
    else:
        cut = bin_.to(gl.float32) + FIRST_BIN
        for tile in gl.static_range(TILES):
            if begin + tile * TILE < end:
                position = begin + tile * TILE + i4
                cut4(
                    ys[tile], cut, words + VOTES + (tile * WARPS + i4 // 128) * 16,
                    (i4 % 128) < 4, words + LISTED, words + LIST, line.to(gl.int64), position,
                    CTAS > 1,
                )  # fmt: skip
    finish(
        words, target, begin, end, above, within, K, t, lane, warp,
        TILES, TILES * WARPS, WARPS, CTAS,
    )  # fmt: skip
