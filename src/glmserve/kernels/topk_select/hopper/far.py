# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""Top-k of rows too long for registers, by a cluster a row that reads them once.

A sample says from where on surely more than k scores lie, and few; where those lie is kept in
shared memory, and the k-th is sought among them alone. Where the sample misled, all of the row is
read again and again instead.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...gluon_common import let_next_start, wait_for_previous
from .cut import (
    BINS,
    CAPACITY,
    FIRST_BIN,
    HIST,
    KEEP,
    KEPT,
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
    mark,
    neighbours,
    sync,
)
from .entries import append, keep4
from .parts import (
    FAR_WORDS,
    cluster_size,
    count_place,
    declare,
    extremes,
    get,
    my_rank,
    no_more,
    peer,
    peer_get,
    put2,
    put4,
    root,
)


@gluon.jit
def _outset(words, line, stop, first, K, t, i4, lane, warp, WARPS: gl.constexpr):
    """(base, bins per unit) of bins from a score that more than K of the row reach, and the largest
    that was seen: all CTAs of a cluster find the same, each from a sample of 128 WARPS."""
    T: gl.constexpr = 32 * WARPS
    at = ((i4 // 4).to(gl.int64) * stop // T).to(gl.int32) // 4 * 4 + i4 % 4
    x = gl.load(line + at, mask=(at >= first) & (at < stop), other=float("nan"))
    base, top = extremes(words + SUMS, x, x, lane, warp, WARPS)
    base = gl.maximum(base, -3.4028234663852886e38) * 0.25
    top = top * 0.25
    # Of the sample, so many are among the row's best K on the average; some more to be sure.
    share = K.to(gl.float32) * (4.0 * T) / gl.maximum(stop, 1).to(gl.float32)
    rank = (share + 4.5 * root(share) + 4.0).to(gl.int32)
    per_unit = 2047.0 / gl.maximum(top - base, 1e-30)
    start = base
    within = rank + 64
    again = rank * 0
    while (within > rank // 4 + 8) & (again < 3):  # the bin is too wide while it holds that many
        if again > 0:
            gl.thread_barrier()
            clear(words, t, WARPS)
            gl.thread_barrier()
        y = bin_of(x, -base, per_unit, 2)
        place = no_more(y.to(gl.int32, bitcast=True) - 0x4B000000, BINS)
        count_place(words + HIST + place * 4)
        found, _, within = find(words, t, lane, warp, rank, WARPS, 1)
        start = base
        if found > 0:
            start = base + found.to(gl.float32) / per_unit
        # The bins of the next turn: this one, and in the last of them all that lies above.
        if (found >= 0) & (found < 2047):
            top = base + (found.to(gl.float32) + 1.0) / per_unit
        base = start
        per_unit = 2047.0 / gl.maximum(top - base, 1e-30)
        again += 1
    _, top = extremes(words + SUMS, x, x, lane, warp, WARPS)
    # The k-th may lie beyond the largest of the sample.
    per_unit = 2047.0 * 0.6666667 / gl.maximum(top * 0.25 - start, 1e-30)
    return -start, per_unit, top


@gluon.jit
def _keep(
    words, line, begin, end, first, base, per_unit, below, i4,
    UNROLL: gl.constexpr, WARPS: gl.constexpr, COUNTS: gl.constexpr,
):  # fmt: skip
    """Reads the CTA's part of a row, counts the bins from `below` on and keeps their places."""
    TILE: gl.constexpr = 128 * WARPS
    # Whole tiles, several in flight; the last ones, and those before `first`, with a mask.
    tiles = gl.maximum(end - begin + TILE - 1, 0) // TILE
    whole = gl.maximum(end - begin, 0) // TILE // UNROLL * UNROLL
    early = gl.minimum(gl.where(begin < first, UNROLL, 0), whole)
    for tile in range(early, whole, UNROLL):
        xs = ()
        for u in gl.static_range(UNROLL):
            xs += (gl.load(line + begin + (tile + u) * TILE + i4),)
        for u in gl.static_range(UNROLL):
            at = (tile + u) * TILE + i4
            keep4(bin_of(xs[u], base, per_unit, 1) - below, at, words, COUNTS, KEPT, KEEP, CAPACITY)
    for other in range(early + tiles - whole):
        at = gl.where(other < early, other, other - early + whole) * TILE + i4
        there = (begin + at < end) & (begin + at >= first)
        x = gl.load(line + begin + at, mask=there, other=float("nan"))
        keep4(bin_of(x, base, per_unit, 1) - below, at, words, COUNTS, KEPT, KEEP, CAPACITY)


@gluon.jit(do_not_specialize=["first", "K"])
def select_far(
    logits, last, out, width, first, K,
    CTAS: gl.constexpr, SEGMENTS: gl.constexpr, WARPS: gl.constexpr, UNROLL: gl.constexpr,
):  # fmt: skip
    """Rows of up to CTAS * 128 SEGMENTS positions, one to CTAS programs."""
    T: gl.constexpr = 32 * WARPS
    TILE: gl.constexpr = 4 * T
    gl.static_assert(T >= ROOM)
    # What each CTA marks and keeps lies within what it declared.
    gl.static_assert(SEGMENTS <= BINS)
    gl.static_assert(VOTES + 16 * SEGMENTS <= KEEP)
    gl.static_assert(KEEP + 4 * CAPACITY <= 4 * FAR_WORDS)
    ONE: gl.constexpr = neighbours(1, WARPS, CTAS)
    FOUR: gl.constexpr = neighbours(4, WARPS, CTAS)
    let_next_start()
    words = declare(True)
    t = gl.arange(0, T, ONE)
    i4 = gl.arange(0, TILE, FOUR)
    lane = t % 32
    warp = t // 32
    clear(words, t, WARPS)
    for i in gl.static_range((SEGMENTS + T - 1) // T):
        segment = i * T + t
        put4(words + VOTES + segment * 16, t * 0, segment < SEGMENTS)
    row = gl.program_id(0)
    wait_for_previous()
    stop = gl.minimum(gl.load(last + row).to(gl.int32) + 1, width)
    line = logits + row.to(gl.int64) * width
    target = out + row.to(gl.int64) * K
    share = ((stop + 127) // 128 + CTAS - 1) // CTAS * 128
    begin = stop * 0
    if CTAS > 1:
        begin = my_rank() * share
    end = gl.minimum(begin + share, stop)
    base, per_unit, top = _outset(words, line, stop, first, K, t, i4, lane, warp, WARPS)
    gl.thread_barrier()
    clear(words, t, WARPS)
    put2(words + KEPT + t * 0, t * 0, t * 0, t == 0)
    gl.thread_barrier()
    _keep(words, line, begin, end, first, base, per_unit, 0.0, i4, UNROLL, WARPS, HIST)
    bin_, above, within = find(words, t, lane, warp, K, WARPS, CTAS)
    kept = get(words + KEPT)
    most = kept
    if CTAS > 1:
        for r in range(cluster_size()):
            most = gl.maximum(most, peer_get(peer(words + KEPT, most * 0 + r), most == most))
    # A short row is its own sample; below an infinite score there are no bins.
    misled = ((bin_ < 0) & (stop > TILE)) | (top == float("inf"))
    if most > CAPACITY:
        # The counts are whole: once more, only what may be selected.
        if (bin_ >= 0) & (within <= ROOM) & (above + within <= CAPACITY):
            sync(CTAS)
            put2(words + KEPT + t * 0, t * 0, t * 0, t == 0)
            gl.thread_barrier()
            _keep(
                words, line, begin, end, first, base, per_unit, bin_.to(gl.float32), i4, UNROLL,
                WARPS, LIST,
            )  # fmt: skip
            gl.thread_barrier()
            kept = get(words + KEPT)
        else:
            misled = bin_ == bin_
    if misled:
        kept = kept * 0 - 1
        bin_ = bin_ * 0 - 1
        above = above * 0
        within = within * 0 + ROOM + 1
    if within > ROOM:
        above, within = cut_again(
            words, line, begin, end, first, kept, base, per_unit, bin_, above, K, t, i4, lane,
            warp, WARPS, CTAS,
        )  # fmt: skip
    else:
        cut = bin_.to(gl.float32) + FIRST_BIN
        for from_ in range(0, kept, T):
            there_ = from_ + t < kept
            off = get(words + KEEP + gl.where(there_, from_ + t, 0) * 4)
            x_ = gl.load(line + begin + off, mask=there_, other=float("nan"))
            y_ = bin_of(x_, base, per_unit, 2)
            mark(words, off, y_ > cut)
            append(words + LISTED + t * 0, words + LIST + t * 0, x_, begin + off, y_ == cut)
    finish(
        words, target, begin, end, above, within, K, t, lane, warp,
        0, SEGMENTS, WARPS, CTAS,
    )  # fmt: skip
