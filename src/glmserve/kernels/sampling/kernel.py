# SPDX-License-Identifier: Apache-2.0
"""One pass over a shard's logits: temperature, noise, the cut, and the shard's best (value, id).

A pair is one int64: the value's ordered key above, 2^31 - 1 - id below, so that the largest pair
has the largest value and among equal ones the lowest id. Programs of a row join by an atomic
maximum; the last one to arrive writes the row's result and leaves the scratch as it was found.
"""

import triton
import triton.language as tl

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
MOST_NOISE = tl.constexpr(16.7)


@triton.jit
def pair_of(values, ids, inside):
    """The largest pair of a block."""
    pairs = (ordered(values).to(tl.int64) << 32) | (ids ^ LAST_ID).to(tl.int64)
    return tl.max(tl.where(inside, pairs, LOWEST), 0)


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
def lowest_pair(ids):
    """What an id without any chance has."""
    key = ordered(tl.full([], float("-inf"), tl.float32)).to(tl.int64)
    return (key << 32) | (ids ^ LAST_ID).to(tl.int64)


@triton.jit
def publish(best, arrived, out, row, pair, splits, decode):
    """Joins the row's pairs; the last program writes the pair, or (decode) its id."""
    tl.atomic_max(best + row, pair, sem="relaxed")
    if tl.atomic_add(arrived + row, 1) == splits - 1:  # orders what lies before and after it
        joined = tl.atomic_xchg(best + row, LOWEST, sem="relaxed")
        tl.store(arrived + row, 0)
        if decode:
            joined = id_in(joined)
        tl.store(out + row, joined)


@triton.jit
def best_noisy(x, words, ids, pair, BLOCK: tl.constexpr):
    """The largest pair of x + noise and of what is known, at a tenth of the noise's cost.

    Bounds come first; exact values then only for what may still win, the best bound first. Bounds
    are tight for large noise, so one or two do, unless logits are so large that noise drowns.
    """
    bounds = x + noise_bound(words)
    most = tl.max(bounds, 0)
    lane = tl.arange(0, BLOCK)
    while (most >= value_in(pair)) & (most > float("-inf")):
        at = tl.min(tl.where(bounds == most, lane, BLOCK), 0)
        here = lane == at
        word = tl.sum(tl.where(here, words, 0), 0).to(tl.uint32)
        value = tl.max(tl.where(here, x, float("-inf")), 0) + noise_of(word)
        key = ordered(value).to(tl.int64) << 32
        taken = tl.max(tl.where(here, ids, 0), 0)
        pair = tl.maximum(pair, key | (taken ^ LAST_ID).to(tl.int64))
        bounds = tl.where(here, float("-inf"), bounds)
        most = tl.max(bounds, 0)
    return pair


@triton.jit(do_not_specialize=["valid", "splits", "blocks", "decode"])
def greedy(
    logits, best, arrived, out, width, first, valid, splits, blocks, decode, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (splits, rows): the first largest logit."""
    row = tl.program_id(1)
    start = tl.program_id(0) * blocks * BLOCK
    pair = tl.full([], LOWEST, tl.int64)
    for block in range(blocks):
        column = start + block * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        ids = first + column
        x = tl.load(logits + row.to(tl.int64) * width + column, mask=inside, other=0.0)
        x = tl.where(ids < valid, x, float("-inf"))
        pair = tl.maximum(pair, pair_of(x, ids, inside))
    publish(best, arrived, out, row, pair, splits, decode)


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
    row = tl.program_id(1)
    line = tl.load(rows + row).to(tl.int64)
    t = tl.load(temperature + line * temperature_stride).to(tl.float32)
    seed = tl.load(seeds + line * seed_stride).to(tl.int64)
    position = tl.load(positions + row).to(tl.int64)
    inverse = inverse_of(t)
    cut = tl.full([], STEPS, tl.int32)
    row_max = tl.full([], 0.0, tl.float32)
    if LIMITS:
        cut = tl.load(cuts + row)
        row_max = value_in(largest_of(largest, row, ranks, lines)) * inverse
    start = tl.program_id(0) * blocks * BLOCK
    # Ids ascend from block to block: a later one has to be larger. Outside ids are -inf.
    pair = lowest_pair(group * 4 + tl.maximum(start, offset))
    for block in range(blocks):
        begin = start + block * BLOCK
        column = begin + tl.arange(0, BLOCK) - offset
        inside = (column >= 0) & (column < width)
        ids = group * 4 + begin + tl.arange(0, BLOCK)
        x = tl.load(logits + row.to(tl.int64) * width + column, mask=inside, other=0.0)
        x = tl.where(inside & (ids < valid), x, float("-inf"))
        if t > 0:
            x = x * inverse
            if LIMITS:
                x = tl.where(distances(x, row_max) <= cut, x, float("-inf"))
            if tl.max(x, 0) + MOST_NOISE > value_in(pair):
                groups = group + begin // 4 + tl.arange(0, BLOCK // 4)
                w0, w1, w2, w3 = philox(seed, position, groups)
                words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
                pair = best_noisy(x, words, ids, pair, BLOCK)
        else:
            pair = tl.maximum(pair, pair_of(x, ids, inside))
    publish(best, arrived, out, row, pair, splits, decode)


@triton.jit(do_not_specialize=["ranks", "rows"])
def join_pairs(pairs, out, ranks, rows, BLOCK: tl.constexpr):
    """pairs [ranks, rows] int64 -> ids [rows] int64."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    joined = tl.full([BLOCK], LOWEST, tl.int64)
    for rank in range(ranks):
        pair = tl.load(pairs + rank * rows + row, mask=row < rows, other=LOWEST)
        joined = tl.maximum(joined, pair)
    tl.store(out + row, id_in(joined), mask=row < rows)
