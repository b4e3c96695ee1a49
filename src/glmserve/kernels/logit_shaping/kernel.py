# SPDX-License-Identifier: Apache-2.0
"""Logit shaping in one pass, the count of confirmed tokens, and grammar masks.

Rows that ask for nothing are copied. Ids that are shut one by one (bad words, early stops) are
written over the pass's own stores, which a barrier orders. Launched without fused multiply-adds.
"""

import triton
import triton.language as tl

from ..triton_common import divide, let_next_start, wait_for_previous
from . import tables

SHAPED = tl.constexpr(tables.SHAPED)
LISTED = tl.constexpr(tables.LISTED)
WORDS = tl.constexpr(tables.WORDS)
MOST = tl.constexpr(tables.MOST_WORDS)
LONGEST = tl.constexpr(tables.LONGEST_WORD)
NO_TOKEN = tl.constexpr(tables.NO_TOKEN)
_CHUNK = tl.constexpr(32)  # bad words at a time


@triton.jit
def _bit(words, column, inside):
    word = tl.load(words + (column >> 5), mask=inside, other=0)
    return ((word >> (column & 31)) & 1) > 0


@triton.jit
def _shut(out, columns, wanted, start, stop):
    """-inf at those columns that lie in this program's part of the row."""
    here = wanted & (columns >= start) & (columns < stop)
    tl.store(out + columns, columns.to(tl.float32) * 0.0 + float("-inf"), mask=here)


@triton.jit(do_not_specialize=["blocks", "stop_count", "drafts", "ahead_stride"])
def shape_rows(
    logits, out, rows, positions, ahead, stops, stops_from,
    flags, penalties, counts, bias, in_prompt, allowed, words, recent,
    ahead_stride, stops_stride, from_stride, width, bit_width, first, blocks, stop_count,
    drafts, STOPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (splits, M)."""
    let_next_start()
    wait_for_previous()
    row = tl.program_id(1).to(tl.int64)
    line = tl.load(rows + row).to(tl.int64)
    asked = tl.load(flags + line)
    presence = tl.load(penalties + line * 3).to(tl.float32)
    frequency = tl.load(penalties + line * 3 + 1).to(tl.float32)
    repetition = tl.load(penalties + line * 3 + 2).to(tl.float32)
    start = tl.program_id(0) * blocks * BLOCK
    for block in range(blocks):
        column = start + block * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        x = tl.load(logits + row * width + column, mask=inside, other=0.0)
        if asked & LISTED:
            x = tl.where(_bit(allowed + line * bit_width, column, inside), x, float("-inf"))
        if asked & SHAPED:
            count = tl.load(counts + line * width + column, mask=inside, other=0)
            for i in range(drafts):
                token = tl.load(ahead + row * ahead_stride + i).to(tl.int32)
                # A column before 0 would meet the tokens of no draft.
                count += ((token >= 0) & (column == token - first)).to(tl.int32)
            x = x + tl.load(bias + line * width + column, mask=inside, other=0.0)
            seen = _bit(in_prompt + line * bit_width, column, inside) | (count > 0)
            repeated = tl.where(x > 0, divide(x, repetition), x * repetition)
            x = tl.where(seen, repeated, x)
            x = x - frequency * count.to(tl.float32)
            x = x - presence * (count > 0).to(tl.float32)
        tl.store(out + row * width + column, x, mask=inside)
    tl.debug_barrier()
    stop = tl.minimum(start + blocks * BLOCK, width)
    own = out + row * width
    early = tl.load(positions + row) < tl.load(stops_from + line * from_stride)
    if early:
        s = tl.arange(0, STOPS)
        there = s < stop_count
        ids = tl.load(stops + line * stops_stride + s, mask=there, other=-1).to(tl.int32)
        _shut(own, ids - first, there & (ids >= 0), start, stop)
    if asked & WORDS:
        known = tl.full([], 0, tl.int32)  # drafts ahead
        for i in range(drafts):
            known += (tl.load(ahead + row * ahead_stride + i) >= 0).to(tl.int32)
        j = tl.arange(0, LONGEST)
        # Token j of the last LONGEST - 1 ones; a word's own last token stands at LONGEST - 1.
        age = LONGEST - 2 - j
        past = tl.load(
            recent + line * LONGEST + (LONGEST - 1 + known - age),
            mask=(age >= known) & (j < LONGEST - 1), other=NO_TOKEN,
        )  # fmt: skip
        newer = tl.load(
            ahead + row * ahead_stride + known - 1 - age,
            mask=(age < known) & (j < LONGEST - 1), other=NO_TOKEN,
        ).to(tl.int32)  # fmt: skip
        past = tl.where(age < known, newer, past)
        for chunk in range(0, MOST, _CHUNK):
            w = chunk + tl.arange(0, _CHUNK)
            word = tl.load(words + (line * MOST + w)[:, None] * LONGEST + j[None, :])
            meets = (word == past[None, :]) | (word < 0) | (j[None, :] == LONGEST - 1)
            whole = tl.min(meets.to(tl.int32), 1) > 0
            ends = tl.sum(tl.where(j[None, :] == LONGEST - 1, word, 0), 1)
            _shut(own, ends - first, whole & (ends >= 0), start, stop)


@triton.jit
def confirm_rows(
    rows, tokens, count, flags, counts, recent,
    row_stride, token_stride, count_stride, width, first, DRAWS: tl.constexpr,
):  # fmt: skip
    """Grid (S,): tokens[:count] of each row."""
    let_next_start()
    wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    line = tl.load(rows + row * row_stride).to(tl.int64)
    n = tl.load(count + row * count_stride).to(tl.int32)
    asked = tl.load(flags + line)
    if (n > 0) & (asked != 0):
        i = tl.arange(0, DRAWS)
        token = tl.load(tokens + row * token_stride + i, mask=i < n, other=-1).to(tl.int32)
        local = token - first
        inside = (i < n) & (local >= 0) & (local < width)
        tl.atomic_add(counts + line * width + local, 1, mask=inside, sem="relaxed")
        if asked & WORDS:
            j = tl.arange(0, LONGEST)
            source = j + n
            old = tl.load(recent + line * LONGEST + source, mask=source < LONGEST, other=0)
            new = tl.load(
                tokens + row * token_stride + source - LONGEST, mask=source >= LONGEST, other=0
            ).to(tl.int32)
            tl.debug_barrier()  # every thread has read before any writes
            tl.store(recent + line * LONGEST + j, tl.where(source < LONGEST, old, new))


@triton.jit
def shut_rows(
    logits, places, bits, place_stride, bits_stride, width, first, first_word, BLOCK: tl.constexpr
):
    """Grid (blocks, P): -inf, in place, where the row's bit of an id is 0."""
    let_next_start()
    wait_for_previous()
    mask = tl.program_id(1)
    place = tl.load(places + mask * place_stride).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    ids = column + first
    allowed = _bit(bits + mask * bits_stride - first_word, ids, inside)
    x = column.to(tl.float32) * 0.0 + float("-inf")
    tl.store(logits + place * width + column, x, mask=inside & ~allowed)
