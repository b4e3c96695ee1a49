# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""Scores as integer keys in the same order, and selection by search: counts at three pivots a pass.

Rows in registers place the pivots by interpolation between counts already known; rows of any length
are read again for each pass of a plain bisection, slow and exact whatever the scores are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_common import INTERPRET

HIDDEN = tl.constexpr(-2147483648)  # the key of a place that is not there


@triton.jit
def to_key(x):
    """Signed keys in the order of fp32 values; -0 counts as 0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def to_value(key):
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def load_keys(row, position, first, stop):
    inside = (position >= first) & (position < stop)
    x = tl.load(row + position, mask=inside, other=float("-inf"))
    return tl.where(x == float("-inf"), HIDDEN, to_key(x))


@triton.jit
def _extremes(a0, a1, a2, b0, b1, b2):
    return tl.minimum(a0, b0), tl.maximum(a1, b1), a2 + b2


@triton.jit
def _add2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def key_range(keys):
    """(least, largest, how many) of the keys that are there."""
    there = keys != HIDDEN
    low = tl.where(there, keys, 0x7FFFFFFF)
    if INTERPRET:  # which walks through a reduction of our own in Python
        return tl.min(low, 0), tl.max(keys, 0), tl.sum(there.to(tl.int32), 0)
    else:
        return tl.reduce((low, keys, there.to(tl.int32)), 0, _extremes)


@triton.jit
def _reach(keys, p1, p2, p3):
    """Lane by lane, whether a key reaches p1, p2 (packed in one word) and p3."""
    return (keys >= p1).to(tl.int32) + ((keys >= p2).to(tl.int32) << 16), (keys >= p3).to(tl.int32)


@triton.jit
def _total(a, b):
    """The three counts of packed lanes; each is at most 65535."""
    if INTERPRET:
        a = tl.sum(a, 0)
        b = tl.sum(b, 0)
    else:
        a, b = tl.reduce((a, b), 0, _add2)
    return a & 0xFFFF, (a >> 16) & 0xFFFF, b


@triton.jit
def _interpolate(v0, v1, c0, c1, rank):
    """The key where a straight line from count c0 at value v0 to c1 at v1 has `rank`."""
    part = (c0 - rank) / (c0 - c1)
    part = tl.minimum(tl.maximum(part, 0.0), 1.0)
    return to_key(v0 * (1.0 - part) + v1 * part)


@triton.jit
def _inside(pivot, low, high):
    """A pivot strictly between two keys (64 bits: their distance can exceed 31)."""
    return tl.minimum(tl.maximum(pivot.to(tl.int64), low + 1), high - 1).to(tl.int32)


@triton.jit
def _narrow(low, high, c0, c1, pivot, count, need):
    """The bracket after learning that `count` keys reach `pivot`."""
    p = pivot.to(tl.int64)
    up = (count >= need) & (p > low)
    down = (count < need) & (p < high)
    return (
        tl.where(up, p, low),
        tl.where(down, p, high),
        tl.where(up, count, c0),
        tl.where(down, count, c1),
    )


@triton.jit
def threshold(keys, least, largest, there, need, slack):
    """(key, ties): take keys >= key where ties < 0, else keys > key and `ties` equal ones.

    `there` keys lie between least and largest, more than `need`. Up to `slack` too many will do.
    Interpolation takes logarithms of counts: tails fall exponentially.
    """
    low = least.to(tl.int64)  # count(low) = c0 >= need > c1 = count(high)
    high = largest.to(tl.int64) + 1
    c0 = there
    c1 = need * 0
    step = need * 0
    ties = need * 0
    while (high - low > 1) & (c0 > need + slack):
        step += 1
        if step % 3 == 0:  # whatever the distribution, two bits of the bracket go
            part = (high - low) // 4
            p1 = (low + part).to(tl.int32)
            p2 = (low + 2 * part).to(tl.int32)
            p3 = (low + 3 * part).to(tl.int32)
        else:
            v0 = to_value(low.to(tl.int32))
            v1 = to_value((high - 1).to(tl.int32))
            f0 = c0.to(tl.float32)
            f1 = tl.maximum(c1.to(tl.float32), 0.5)
            goal = need.to(tl.float32) + slack * 0.5
            margin = 0.87 / goal  # of a count's logarithm, at least
            f0 = tl.log2(f0)
            f1 = tl.log2(f1)
            goal = tl.log2(goal)
            margin = tl.maximum((f0 - f1) * 0.0625, margin)
            p1 = _interpolate(v0, v1, f0, f1, goal + margin)
            p2 = _interpolate(v0, v1, f0, f1, goal)
            p3 = _interpolate(v0, v1, f0, f1, goal - margin)
        p1 = _inside(p1, low, high)
        p2 = _inside(p2, low, high)
        p3 = _inside(p3, low, high)
        a, b = _reach(keys, p1, p2, p3)
        n1, n2, n3 = _total(a, b)
        low, high, c0, c1 = _narrow(low, high, c0, c1, p1, n1, need)
        low, high, c0, c1 = _narrow(low, high, c0, c1, p2, n2, need)
        low, high, c0, c1 = _narrow(low, high, c0, c1, p3, n3, need)
    ties = tl.where(c0 <= need + slack, -1, need - c1)
    return low.to(tl.int32), ties


@triton.jit
def _compact(out, keys, positions, least, ties, already, tied_already, K):
    """Writes the selected positions in order behind `already`; returns the new two counts."""
    over = tl.where(ties < 0, keys >= least, keys > least) & (keys != HIDDEN)
    equal = (keys == least) & (ties >= 0) & (keys != HIDDEN)
    ranks = tl.cumsum(over.to(tl.int32) + (equal.to(tl.int32) << 16), 0)
    overs = ranks & 0xFFFF
    equals = (ranks >> 16) + tied_already
    room = tl.maximum(ties, 0)
    place = already + overs + tl.minimum(equals, room) - tl.minimum(tied_already, room) - 1
    chosen = (over | (equal & (equals <= room))) & (place < K)
    tl.store(out + place, positions, mask=chosen)
    tied = tl.max(equals, 0)
    count = tl.max(overs, 0) + tl.minimum(tied, room) - tl.minimum(tied_already, room)
    return already + count, tied


@triton.jit
def pad(out, count, K, WIDTH: tl.constexpr):
    i = tl.arange(0, WIDTH)
    tl.store(out + i, i * 0 - 1, mask=(i >= count) & (i < K))


@triton.jit
def from_registers(out, keys, positions, K, WIDTH: tl.constexpr):
    low, high, there = key_range(keys)
    ties = there * 0 - 1
    if there > K:
        low, ties = threshold(keys, low, high, there, there * 0 + K, 0)
    count, _ = _compact(out, keys, positions, low, ties, there * 0, there * 0, K)
    pad(out, count, K, WIDTH)


@triton.jit
def from_memory(out, row, first, stop, K, WIDTH: tl.constexpr, N: tl.constexpr):
    """As from_registers for a row of any length, read again for each pass of a plain bisection."""
    lane = tl.arange(0, N)
    counts = tl.zeros([N], tl.int32)
    for begin in range(0, stop, N):
        counts += (load_keys(row, begin + lane, first, stop) != HIDDEN).to(tl.int32)
    c0 = tl.sum(counts, 0)
    c1 = c0 * 0
    need = c1 + K
    low = c0.to(tl.int64) * 0 - 2147483647
    high = c0.to(tl.int64) * 0 + 2147483647
    while (high - low > 1) & (c0 > need):
        part = (high - low) // 4
        p1 = _inside(low + part, low, high)
        p2 = _inside(low + 2 * part, low, high)
        p3 = _inside(low + 3 * part, low, high)
        n1 = tl.zeros([N], tl.int32)
        n2 = tl.zeros([N], tl.int32)
        n3 = tl.zeros([N], tl.int32)
        for begin in range(0, stop, N):
            keys = load_keys(row, begin + lane, first, stop)
            n1 += (keys >= p1).to(tl.int32)
            n2 += (keys >= p2).to(tl.int32)
            n3 += (keys >= p3).to(tl.int32)
        low, high, c0, c1 = _narrow(low, high, c0, c1, p1, tl.sum(n1, 0), need)
        low, high, c0, c1 = _narrow(low, high, c0, c1, p2, tl.sum(n2, 0), need)
        low, high, c0, c1 = _narrow(low, high, c0, c1, p3, tl.sum(n3, 0), need)
    ties = tl.where(c0 <= need, -1, need - c1)
    already = need * 0
    tied = need * 0
    for begin in range(0, stop, N):
        keys = load_keys(row, begin + lane, first, stop)
        already, tied = _compact(out, keys, begin + lane, low.to(tl.int32), ties, already, tied, K)
    pad(out, already, K, WIDTH)
