# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""Finding the bin of the k-th score, cutting it again, and writing down what is selected.

Scores fall into 2048 bins of equal width, counted in shared memory; the entries of the bin where
the count from above reaches k are ranked one against the other. Where they are too many, the bin
is cut again, by the scores' bits and at last by their positions, until they are few: no scores are
slow by more than some passes. A bit for each position then says what is selected, and counts of
bits where it is written. CTAs of a cluster read each other's counts and lists and all come to the
same cut.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .entries import append4, put_extremes, put_marked, put_votes
from .parts import (
    add_up,
    arrive_here,
    at_most,
    bits_below,
    bits_of,
    cluster_size,
    count_up,
    get,
    get4,
    get_long,
    lane_of,
    meet,
    my_rank,
    peer,
    peer_get,
    peer_get2,
    peer_words,
    put,
    put2,
    put_out,
    scan,
    set_bits,
)

BINS = gl.constexpr(2048)
ROOM = gl.constexpr(512)  # entries that are ranked one against the other
FIRST_BIN = gl.constexpr(8388608.0)  # 2^23: a float's last bits count ones from here on
# Shared memory, in bytes. HIST has a word more for what lies in no bin; PLACE follows it in time.
HIST = gl.constexpr(0)
PLACE = gl.constexpr(0)
GROUPS = gl.constexpr(4 * 2052)  # counts of each thread's bins
SUMS = gl.constexpr(4 * 3076)  # of warps
FOUND = gl.constexpr(4 * 3140)  # bin, above, within, -
LISTED = gl.constexpr(4 * 3144)  # how many are listed here, how many lie above here
CHOSEN = gl.constexpr(4 * 3146)  # by this CTA
BEFORE = gl.constexpr(4 * 3147)  # chosen of the list, by lower CTAs
LOW = gl.constexpr(4 * 3148)
HIGH = gl.constexpr(4 * 3149)
KEPT = gl.constexpr(4 * 3152)  # how many `far` keeps
LIST = gl.constexpr(4 * 3168)  # entries of this CTA: two words each
ALL = gl.constexpr(4 * 4192)  # and of all
VOTES = gl.constexpr(4 * 5216)  # four words for 128 positions
KEEP = gl.constexpr(4 * 9344)  # positions that `far` keeps
CAPACITY = gl.constexpr(2912)


@gluon.constexpr_function
def neighbours(many, warps, ctas):
    """So many neighbours a thread; every CTA of a cluster has tensors of its own."""
    return gl.BlockedLayout([many], [32], [warps], [0], [[0]] * (ctas.bit_length() - 1))


@gluon.jit
def sync(CTAS: gl.constexpr):
    if CTAS == 1:
        gl.thread_barrier()
    else:
        arrive_here()
        meet()


@gluon.jit
def bin_of(x, base, per_unit, CTAS: gl.constexpr):
    """The bin as a float from 2^23 on, never descending in x; less for what lies below the first
    bin (all hidden scores do) and NaN for NaN. A CTA alone knows the largest score; else what is
    above the last bin lies in it."""
    y = gl.fma(gl.fma(x, 0.25, base), per_unit, FIRST_BIN)
    if CTAS > 1:
        y = at_most(y, FIRST_BIN + 2047.0)
    return y


@gluon.jit
def key_of(x):
    bits = (x + 0.0).to(gl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@gluon.jit
def block_scan(words, value, lane, warp, sums, WARPS: gl.constexpr):
    """Sums up to each thread of a CTA. One barrier."""
    reached = scan(value)
    put(words + sums + warp * 4, reached, lane == 31)
    gl.thread_barrier()
    of_warps = get(words + sums + gl.minimum(lane, WARPS - 1) * 4)
    of_warps = scan(of_warps)
    before = lane_of(of_warps, gl.maximum(warp - 1, 0))
    return reached + gl.where(warp > 0, before, 0)


@gluon.jit
def clear(words, t, WARPS: gl.constexpr):
    """No counts, nothing found, nothing listed."""
    zero = t * 0
    for i in gl.static_range(2048 // (32 * WARPS) // 2):
        put2(words + HIST + (i * 64 * WARPS + t * 2) * 4, zero, zero, t >= 0)
    put(words + FOUND + t * 4, gl.where(t == 0, -1, 0), t < 12)


@gluon.jit
def find(words, t, lane, warp, need, WARPS: gl.constexpr, CTAS: gl.constexpr):
    """(bin, count above it, count in it) where counts from the top reach `need`; (-1, 0, 0) if
    they do not. After counts are made; all of a cluster find the same."""
    PART: gl.constexpr = 2048 // (32 * WARPS)
    AT_ONCE: gl.constexpr = min(CTAS, 8)
    FEWER: gl.constexpr = min(CTAS, 4)  # of several words
    gl.thread_barrier()
    mine = words + HIST + (2047 - t * PART) * 4
    total = t * 0
    counts = ()
    for i in gl.static_range(PART):
        counts += (get(mine - 4 * i),)
        total += counts[i]
    if CTAS > 1:
        put(words + GROUPS + t * 4, total, t >= 0)
        sync(CTAS)
        total = t * 0
        for from_ in range(0, cluster_size(), AT_ONCE):
            for r in gl.static_range(AT_ONCE):
                total += peer_get(peer(words + GROUPS + t * 4, t * 0 + from_ + r), t >= 0)
    reached = block_scan(words, total, lane, warp, SUMS, WARPS)
    hit = (reached >= need) & (reached - total < need)
    before = reached - total
    at = words + FOUND + t * 0
    if CTAS > 1:
        counts = ()
        for _ in gl.static_range(PART):
            counts += (t * 0,)
        for from_ in range(0, cluster_size(), FEWER):
            for r in gl.static_range(FEWER):
                theirs = peer_words(peer(mine - 4 * (PART - 1), t * 0 + from_ + r), hit, PART)
                summed = ()
                for i in gl.static_range(PART):
                    summed += (counts[i] + theirs[PART - 1 - i],)
                counts = summed
    for i in gl.static_range(PART):
        here = counts[i]
        this = hit & (before < need) & (before + here >= need)
        put(at, 2047 - t * PART - i, this)
        put(at + 4, before, this)
        put(at + 8, here, this)
        before += here
    gl.thread_barrier()
    return get(words + FOUND), get(words + FOUND + 4), get(words + FOUND + 8)


@gluon.jit
def values(x, position, key, by_place):
    """What is cut: scores' bits, or (lower ones first) positions where all of them are `key`."""
    mine = key_of(x)
    return gl.where(by_place != 0, 0x7FFFFFFF - position, mine), (x > float("-inf")) & (
        (mine == key) | (by_place == 0)
    )


@gluon.jit
def again(words, line, begin, tile, stop, first, kept, i4, TILE: gl.constexpr):
    """A tile's scores and positions, of those that `far` kept unless `kept` is negative."""
    at = tile * TILE + i4
    position = begin + at
    inside = (position < stop) & (position >= first)
    if kept >= 0:
        inside = at < kept
        position = begin + get(words + KEEP + gl.where(inside, at, 0) * 4)
    return gl.load(line + position, mask=inside, other=float("nan")), position


@gluon.jit
def vote(words, over, tile, i4, WARPS: gl.constexpr):
    """Sets a tile's bits, and adds up how many are set."""
    put_votes(
        words + VOTES + (tile * WARPS + i4 // 128) * 16, over, words + LISTED + 4 + i4 * 0,
        (i4 % 128) < 4,
    )  # fmt: skip


@gluon.jit
def mark(words, at, over):
    """Sets single bits, and adds up how many are set; `at` counts from the CTA's begin."""
    count_up(words + LISTED + 4 + at * 0, over)
    word = (at >> 7) * 4 + (at & 3)
    set_bits(words + VOTES + gl.where(over, word, 0) * 4, (at * 0 + 1) << ((at >> 2) & 31), over)


@gluon.jit
def cut_again(
    words, line, begin, stop, first, kept, base, per_unit, bin_, above, K, t, i4, lane, warp,
    WARPS: gl.constexpr, CTAS: gl.constexpr,
):  # fmt: skip
    """Cuts a bin of more than ROOM entries (the whole row for a negative one) until one of ROOM or
    less holds the k-th; votes, and lists its entries. Scores are read again and again: of those
    that `far` kept, or of all."""
    TILE: gl.constexpr = 128 * WARPS
    tiles = (stop - begin + TILE - 1) // TILE
    if kept >= 0:
        tiles = (kept + TILE - 1) // TILE
    # Between which bits the bin's scores lie.
    put(words + LOW + t * 4, gl.where(t == 0, 0x7FFFFFFF, -2147483647), t < 2)
    gl.thread_barrier()
    for tile in range(tiles):
        x, _ = again(words, line, begin, tile, stop, first, kept, i4, TILE)
        y = bin_of(x, base, per_unit, CTAS)
        here = (x > float("-inf")) & ((y == bin_.to(gl.float32) + FIRST_BIN) | (bin_ < 0))
        put_extremes(words + LOW + i4 * 0, words + HIGH + i4 * 0, key_of(x), here)
    sync(CTAS)
    low = get(words + LOW)
    high = get(words + HIGH)
    if CTAS > 1:
        for r in range(cluster_size()):
            a = peer_get(peer(words + LOW, low * 0 + r), low == low)
            b = peer_get(peer(words + HIGH, low * 0 + r), low == low)
            low = gl.minimum(low, a)
            high = gl.maximum(high, b)
    key = low * 0
    by_place = low * 0
    within = low * 0 + ROOM + 1
    while within > ROOM:
        if (low == high) & (by_place == 0):
            key = low
            by_place = low * 0 + 1
            low = low * 0
            high = low * 0 + 0x7FFFFFFF
        # The least shift that leaves the range below 2048.
        shift = low * 0
        while ((high.to(gl.int64) - low.to(gl.int64)) >> shift.to(gl.int64)) >= BINS:
            shift += 1
        sync(CTAS)  # nobody reads the last counts any more
        clear(words, t, WARPS)
        gl.thread_barrier()
        for tile in range(tiles):
            x, position = again(words, line, begin, tile, stop, first, kept, i4, TILE)
            value, there = values(x, position, key, by_place)
            there = there & (value >= low) & (value <= high)
            place = ((value.to(gl.int64) - low.to(gl.int64)) >> shift.to(gl.int64)).to(gl.int32)
            count_up(words + HIST + gl.where(there, place, 0) * 4, there)
        found, more, within = find(words, t, lane, warp, K - above, WARPS, CTAS)
        above += more
        start = low.to(gl.int64) + (found.to(gl.int64) << shift.to(gl.int64))
        end = start + ((low * 0 + 1).to(gl.int64) << shift.to(gl.int64)) - 1
        high = gl.minimum(high.to(gl.int64), end).to(gl.int32)
        low = start.to(gl.int32)
        if found < 0:  # all that are seen are fewer than k
            low = low * 0 - 2147483647 - 1
            high = low
    for tile in range(tiles):
        x, position = again(words, line, begin, tile, stop, first, kept, i4, TILE)
        value, there = values(x, position, key, by_place)
        over = (there & (value > high)) | (
            (by_place != 0) & (x > float("-inf")) & (key_of(x) > key)
        )
        if kept >= 0:
            mark(words, position - begin, over)
        else:
            vote(words, over, tile, i4, WARPS)
        append4(
            words + LISTED + i4 * 0, words + LIST + i4 * 0, x, position,
            there & (value >= low) & (value <= high),
        )  # fmt: skip
    return above, within


@gluon.jit
def finish(
    words, target, begin, end, above, within, K, t, lane, warp,
    TILES: gl.constexpr, SEGMENTS: gl.constexpr, WARPS: gl.constexpr, CTAS: gl.constexpr,
):  # fmt: skip
    """After votes for what lies above the last bin and a list of what lies in it: chooses of the
    list, and writes all positions in order. TILES: of 128 WARPS positions, 0 if they are many."""
    T: gl.constexpr = 32 * WARPS
    sync(CTAS)
    entries = words + LIST
    before = t * 0
    over = t * 0
    if CTAS > 1:
        entries = words + ALL
        listed, lie_above = peer_get2(peer(words + LISTED, gl.minimum(lane, CTAS - 1)))
        reached = scan(gl.where(lane < CTAS, listed, 0))
        lie_above = scan(gl.where(lane < CTAS, lie_above, 0))
        over = lane_of(lie_above, t * 0 + CTAS - 1)
        me = my_rank()
        before = gl.where(me > 0, lane_of(lie_above, t * 0 + gl.maximum(me - 1, 0)), 0)
        # Each of CTAS groups of threads copies one CTA's entries.
        SPAN: gl.constexpr = T // CTAS
        from_ = t // SPAN
        listed = lane_of(listed, from_)
        already = lane_of(reached, from_) - listed
        theirs = peer(words + LIST, from_)
        for i in range(0, within, SPAN):
            e = i + t % SPAN
            a = peer_get(theirs + e * 8, e < listed)
            b = peer_get(theirs + e * 8 + 4, e < listed)
            put2(entries + (already + e) * 8, a, b, e < listed)
        gl.thread_barrier()
        arrive_here()  # the last look at a peer's memory
    if within > 0:
        entry = get_long(entries + gl.minimum(t, ROOM - 1) * 8)
        better = t * 0
        for j in range(0, within, 4):
            for u in gl.static_range(4):
                other = get_long(entries + (j + u) * 8)
                better += ((other > entry) & (j + u < within)).to(gl.int32)
        chosen = (t < within) & (better < K - above)
        at = 0x7FFFFFFF - entry.to(gl.int32) - begin
        inside = chosen & (at >= 0) & (at < end - begin)
        word = (at >> 7) * 4 + (at & 3)
        bit = (t * 0 + 1) << ((at >> 2) & 31)
        set_bits(words + VOTES + gl.where(inside, word, 0) * 4, bit, inside)
        if CTAS > 1:
            add_up(words + BEFORE + t * 0, t * 0 + 1, chosen & (at < 0))
        gl.thread_barrier()
        before += get(words + BEFORE)
    segments = (end - begin + 127) // 128
    EACH: gl.constexpr = (SEGMENTS + T - 1) // T  # of a thread
    total = t * 0
    for i in gl.static_range(EACH):
        segment = t * EACH + i
        a, b, c, d = get4(words + VOTES + gl.minimum(segment, SEGMENTS - 1) * 16)
        bits = bits_of(a) + bits_of(b) + bits_of(c) + bits_of(d)
        total += gl.where(segment < segments, bits, 0)
    reached = block_scan(words, total, lane, warp, SUMS, WARPS)
    place = before + reached - total
    for i in gl.static_range(EACH):
        segment = t * EACH + i
        put(words + PLACE + segment * 4, place, segment < segments)
        if i + 1 < EACH:
            a, b, c, d = get4(words + VOTES + gl.minimum(segment, SEGMENTS - 1) * 16)
            place += bits_of(a) + bits_of(b) + bits_of(c) + bits_of(d)
    put(words + CHOSEN + t * 0, reached, t == T - 1)
    gl.thread_barrier()
    if TILES > 0:
        for tile in gl.static_range(TILES):
            if begin + tile * 128 * WARPS < end:
                expand(words, target, begin, tile * WARPS + warp, lane)
    elif segments <= 4 * WARPS:  # a short row: many bits a segment
        for tile in range((segments + WARPS - 1) // WARPS):
            expand(words, target, begin, tile * WARPS + warp, lane)
    else:
        for i in gl.static_range(EACH):
            segment = t * EACH + i
            a, b, c, d = get4(words + VOTES + gl.minimum(segment, SEGMENTS - 1) * 16)
            to = target + get(words + PLACE + gl.minimum(segment, SEGMENTS - 1) * 4)
            put_marked(to, begin + segment * 128, a, b, c, d, segment < segments)
    if (within == 0) & (begin == 0):  # no k-th: all that are seen are selected
        if CTAS == 1:
            over = get(words + CHOSEN + t * 0)
        for unused in range(0, K, T):
            put_out(target + unused + t, t * 0 - 1, (unused + t >= over) & (unused + t < K))
    if CTAS > 1:
        meet()


@gluon.jit
def expand(words, target, begin, segment, lane):
    """Writes a segment's positions; a warp takes one."""
    a, b, c, d = get4(words + VOTES + segment * 16)
    place = get(words + PLACE + segment * 4)
    place += bits_below(a, lane) + bits_below(b, lane)
    place += bits_below(c, lane) + bits_below(d, lane)
    start = begin + segment * 128 + lane * 4
    votes = (a, b, c, d)
    to = target + place
    for j in gl.static_range(4):
        on = (votes[j] >> lane) & 1
        put_out(to, start + j, on != 0)
        to += on
