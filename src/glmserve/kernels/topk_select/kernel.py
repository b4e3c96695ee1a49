# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""Top-k of a row of any length by one program, plain: what the interpreter runs, and rows that are
longer than the Gluon forms (`hopper`) serve.

Scores are integer keys in the same order; three pivots a pass cut the bracket of the k-th in four.
The row is read again for each pass: slow, and exact whatever the scores are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_common import let_next_start, wait_for_previous

HIDDEN = tl.constexpr(-2147483648)  # the key of a place that is not there


@triton.jit
def _load_keys(row, position, first, stop):
    """-0 counts as 0."""
    inside = (position >= first) & (position < stop)
    x = tl.load(row + position, mask=inside, other=float("-inf"))
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(x == float("-inf"), HIDDEN, key)


@triton.jit
def _inside(pivot, low, high):
    """A pivot strictly between two keys (64 bits: their distance can exceed 31)."""
    return tl.minimum(tl.maximum(pivot, low + 1), high - 1).to(tl.int32)


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


@triton.jit(do_not_specialize=["first", "K"])
def select_plain(logits, last, out, width, first, K, WIDTH: tl.constexpr, N: tl.constexpr):
    """N positions at a time; K is at most WIDTH."""
    row = tl.program_id(0)
    let_next_start()
    wait_for_previous()
    stop = tl.minimum(tl.load(last + row).to(tl.int32) + 1, width)
    line = logits + row.to(tl.int64) * width
    target = out + row.to(tl.int64) * K
    lane = tl.arange(0, N)
    counts = tl.zeros([N], tl.int32)
    for begin in range(0, stop, N):
        counts += (_load_keys(line, begin + lane, first, stop) != HIDDEN).to(tl.int32)
    c0 = tl.sum(counts, 0)  # of keys that reach low; c1: that reach high
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
            keys = _load_keys(line, begin + lane, first, stop)
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
        keys = _load_keys(line, begin + lane, first, stop)
        already, tied = _compact(
            target, keys, begin + lane, low.to(tl.int32), ties, already, tied, K
        )
    i = tl.arange(0, WIDTH)
    tl.store(target + i, i * 0 - 1, mask=(i >= already) & (i < K))
