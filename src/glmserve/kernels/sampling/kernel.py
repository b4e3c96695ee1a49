# SPDX-License-Identifier: Apache-2.0
"""One pass over a shard's logits: temperature, noise, the cut, and the shard's best (value, id).

A pair is one int64: the value's ordered key above, 2^31 - 1 - id below, so that the largest pair
has the largest value and among equal ones the lowest id. Programs of a row join by an atomic
maximum; the last one to arrive writes the row's result and leaves the scratch as it was found.

Noise is dear, so a draw looks at bounds of it, a tenth of the cost. Every lane keeps its column
with the largest bound, and how large the next bound is; only the kept ones get their exact value.
Should a bound that was dropped reach the best exact value, the program goes over its columns again.
"""

import triton
import triton.language as tl

from ..triton_common import let_next_start, wait_for_previous
from .arithmetic import (
    STEPS,
    distances,
    inverse_of,
    noise_bound,
    noise_of,
    ordered,
    philox,
    value_of,
)

LOWEST = tl.constexpr(-(1 << 63))
LAST_ID = tl.constexpr(0x7FFFFFFF)
NOTHING = tl.constexpr(float("-inf"))
# Elements from one row's scratch to the next: lines of their own, or their atomics would queue.
BEST_LINE, ARRIVED_LINE = tl.constexpr(16), tl.constexpr(32)


@triton.jit
def pair_of(values, ids):
    """Pairs of a block, elementwise."""
    return (ordered(values).to(tl.int64) << 32) | (ids ^ LAST_ID).to(tl.int64)


@triton.jit
def value_in(pair):
    return value_of((pair >> 32).to(tl.int32))


@triton.jit
def id_in(pair):
    return (pair & LAST_ID) ^ LAST_ID


@triton.jit
def largest_of(pairs, row, ranks, lines):
    """The largest of [ranks, lines] pairs of a row."""
    pair = tl.load(pairs + row)
    for rank in range(1, ranks):
        pair = tl.maximum(pair, tl.load(pairs + rank * lines + row))
    return pair


@triton.jit
def arrive(best, arrived, out, row, splits, decode):
    """The last program of a row writes its pair, or (decode) its id.

    No release: nothing but `best` is handed on, and its maximum was acquired, so this warp has its
    answer from the L2 cache (ATOMG, and a wait for it) before it counts itself there.
    """
    if tl.atomic_add(arrived + row * ARRIVED_LINE, 1, sem="acquire") == splits - 1:
        joined = tl.atomic_xchg(best + row * BEST_LINE, LOWEST, sem="relaxed")
        tl.store(arrived + row * ARRIVED_LINE, 0)
        if decode:
            joined = id_in(joined)
        tl.store(out + row, joined)


@triton.jit(do_not_specialize=["valid", "splits", "blocks", "decode"])
def greedy(
    logits, best, arrived, out, width, first, valid, splits, blocks, decode, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (splits, rows): the first largest logit."""
    let_next_start()
    row = tl.program_id(1)
    start = tl.program_id(0) * blocks * BLOCK
    pairs = tl.full([BLOCK], LOWEST, tl.int64)
    wait_for_previous()
    for block in range(blocks):
        column = start + block * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        ids = first + column
        x = tl.load(logits + row.to(tl.int64) * width + column, mask=inside, other=0.0)
        x = tl.where(ids < valid, x, NOTHING)
        pairs = tl.maximum(pairs, tl.where(inside, pair_of(x, ids), LOWEST))
    tl.atomic_max(best + row * BEST_LINE, tl.max(pairs, 0), sem="acquire")
    arrive(best, arrived, out, row, splits, decode)


@triton.jit
def _scaled(x, ids, valid, inverse, row_max, cut, LIMITS: tl.constexpr):
    """Logits as noise is added to them; -inf is never drawn."""
    x = tl.where(ids < valid, x * inverse, NOTHING)
    if LIMITS:
        x = tl.where(distances(x, row_max) <= cut, x, NOTHING)
    return x


@triton.jit
def _larger(b, x, word, id, next_b, other_b, other_x, other_word, other_id, other_next):
    """Of two columns a lane, the one with the larger bound, the first of equals; and the largest
    bound of what is left behind."""
    take = other_b > b
    next_b = tl.maximum(tl.maximum(next_b, other_next), tl.minimum(b, other_b))
    return (
        tl.where(take, other_b, b), tl.where(take, other_x, x), tl.where(take, other_word, word),
        tl.where(take, other_id, id), next_b,
    )  # fmt: skip


@triton.jit
def _fours(x, LANES: tl.constexpr):
    """[4 LANES] -> four of [LANES]: x[0::4], x[1::4], ..."""
    even, odd = tl.split(tl.reshape(x, [LANES, 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit(do_not_specialize=["valid", "splits", "blocks", "group", "lines", "decode"])
def draw(
    logits, temperature, seeds, rows, positions, cuts, largest, best, arrived, out,
    temperature_stride, seed_stride, width, offset, group, valid, splits, blocks, ranks, lines,
    decode, LIMITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (splits, rows). The shard's ids start at 4 group + offset: four ids share a counter.

    cuts [rows] int32: the largest distance that may be drawn; largest [ranks, rows]: the pairs of
    all ranks' largest logits, that distances count from.
    """
    LANES: tl.constexpr = BLOCK // 4
    let_next_start()
    row = tl.program_id(1)
    start = tl.program_id(0) * blocks * BLOCK
    lane = tl.arange(0, LANES)
    i = tl.arange(0, BLOCK)
    source = logits + row.to(tl.int64) * width - offset
    wait_for_previous()
    # Asked for before the settings, which take two loads one behind the other.
    there = (start + i >= offset) & (start + i < width + offset)
    following = tl.load(source + start + i, mask=there, other=NOTHING)
    line = tl.load(rows + row).to(tl.int64)
    t = tl.load(temperature + line * temperature_stride).to(tl.float32)
    seed = tl.load(seeds + line * seed_stride).to(tl.int64)
    position = tl.load(positions + row).to(tl.int64)
    inverse = inverse_of(t)
    cut = tl.full([], STEPS, tl.int32)
    row_max = tl.full([], 0.0, tl.float32)
    if LIMITS:
        if t > 0:
            cut = tl.load(cuts + row)
            row_max = value_in(largest_of(largest, row, ranks, lines)) * inverse

    b = tl.full([LANES], NOTHING, tl.float32)
    x = b
    next_b = b
    word = (lane * 0).to(tl.uint32)
    id = lane * 0
    for block in range(blocks):
        begin = start + block * BLOCK
        logit = following
        after = begin + BLOCK + i
        there = (after < width + offset) & (block + 1 < blocks)
        following = tl.load(source + after, mask=there, other=NOTHING)
        logit = _scaled(logit, group * 4 + begin + i, valid, inverse, row_max, cut, LIMITS)
        x0, x1, x2, x3 = _fours(logit, LANES)
        b0, b1, b2, b3 = x0, x1, x2, x3
        w0, w1, w2, w3 = word, word, word, word
        groups = group + begin // 4 + lane
        if t > 0:
            w0, w1, w2, w3 = philox(seed, position, groups)
            b0 = x0 + noise_bound(w0)
            b1 = x1 + noise_bound(w1)
            b2 = x2 + noise_bound(w2)
            b3 = x3 + noise_bound(w3)
        n = tl.full([LANES], NOTHING, tl.float32)
        ids = groups * 4
        b0, x0, w0, i0, n0 = _larger(b0, x0, w0, ids, n, b1, x1, w1, ids + 1, n)
        b2, x2, w2, i2, n2 = _larger(b2, x2, w2, ids + 2, n, b3, x3, w3, ids + 3, n)
        b0, x0, w0, i0, n0 = _larger(b0, x0, w0, i0, n0, b2, x2, w2, i2, n2)
        b, x, word, id, next_b = _larger(b, x, word, id, next_b, b0, x0, w0, i0, n0)

    value = x
    if t > 0:
        value = x + noise_of(word)
    # Without any column that may be drawn, it is the first of all.
    pair = pair_of(tl.full([], NOTHING, tl.float32), group * 4 + tl.maximum(start, offset))
    pair = tl.maximum(pair, tl.max(tl.where(x > NOTHING, pair_of(value, id), LOWEST), 0))
    known = tl.maximum(tl.atomic_max(best + row * BEST_LINE, pair, sem="acquire"), pair)
    left = tl.max(next_b, 0)
    if (t > 0) & (left > NOTHING) & (left >= value_in(known)):
        for block in range(blocks):
            begin = start + block * BLOCK
            there = (begin + i >= offset) & (begin + i < width + offset)
            ids = group * 4 + begin + i
            logit = tl.load(source + begin + i, mask=there, other=NOTHING)
            logit = _scaled(logit, ids, valid, inverse, row_max, cut, LIMITS)
            w0, w1, w2, w3 = philox(seed, position, group + begin // 4 + lane)
            words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
            pairs = tl.where(logit > NOTHING, pair_of(logit + noise_of(words), ids), LOWEST)
            pair = tl.maximum(pair, tl.max(pairs, 0))
        tl.atomic_max(best + row * BEST_LINE, pair, sem="acquire")
    arrive(best, arrived, out, row, splits, decode)


@triton.jit(do_not_specialize=["ranks", "rows"])
def join_pairs(pairs, out, ranks, rows, BLOCK: tl.constexpr):
    """pairs [ranks, rows] int64 -> ids [rows] int64."""
    let_next_start()
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wait_for_previous()
    joined = tl.full([BLOCK], LOWEST, tl.int64)
    for rank in range(ranks):
        pair = tl.load(pairs + rank * rows + row, mask=row < rows, other=LOWEST)
        joined = tl.maximum(joined, pair)
    tl.store(out + row, id_in(joined), mask=row < rows)
