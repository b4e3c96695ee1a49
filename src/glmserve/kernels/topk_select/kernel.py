# SPDX-License-Identifier: Apache-2.0
"""Top-k by one cut: scores fall into bins of equal width, and the bin where the count from above
reaches k is looked at closely.

A row that one CTA holds needs nothing else. Longer rows, if few, are spread over CTAs that meet
twice: when all scores are counted (the bins' edges come from a sample that all of them read), and
when the entries of the bin that was found are listed. Where those are more than ROOM (long ties,
outliers that stretch the bins) the row is bisected.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_common import let_next_start, wait_for_previous
from .few import BINS, ROOM, count, counts, entry, find, key_and_position, nth, prepare
from .search import HIDDEN, from_memory, key_range, load_keys, pad, to_key, to_value

ALL, TALLY, LIST, WRITE = (tl.constexpr(i) for i in range(4))


@triton.jit
def _quarter(keys):
    """Values in the order of keys, so that no difference of two overflows."""
    return to_value(keys) * 0.25


@triton.jit
def _edges(low, high):
    """(base, bins per unit) of bins from one key to another."""
    base = _quarter(low)
    return base, 2047.0 / tl.maximum(_quarter(high) - base, 1e-30)


@triton.jit
def _bins(keys, base, per_unit):
    """Never descending in the key; what lies outside goes to the first or the last."""
    place = (_quarter(keys) - base) * per_unit
    return tl.minimum(tl.maximum(place, 0.0), 2047.0).to(tl.int32)


@triton.jit
def _reaches(keys, position, cut):
    key, place = key_and_position(cut)
    return (keys > key) | ((keys == key) & (position <= place))


@triton.jit
def _select(
    words, target, line, from_, first, stop, width, K, WIDTH: tl.constexpr, N: tl.constexpr
):
    """The whole of a row that ends before from_ + N."""
    position = from_ + tl.arange(0, N)
    # Read without waiting for where the row ends.
    x = tl.load(line + position, mask=position < width, other=float("-inf"))
    hidden = (x == float("-inf")) | (position < first) | (position >= stop)
    keys = tl.where(hidden, HIDDEN, to_key(x))
    low, high, there = key_range(keys)
    seen = keys != HIDDEN
    base, per_unit = _edges(low, high)
    place = _bins(keys, base, per_unit)
    bin_, above, within = find(words, counts(words, count(words, place, seen)), K)
    if within > ROOM:
        from_memory(target, line, first, stop, K, WIDTH, N)
    else:
        chosen = seen
        if within > 0:
            mine = seen & (place == bin_)
            cut = nth(words, entry(keys, position), mine, within, K - above)
            chosen = seen & _reaches(keys, position, cut)
        rank = tl.cumsum(chosen.to(tl.int32), 0)
        tl.store(target + rank - 1, position, mask=chosen)
        if there < K:
            pad(target, there, K, WIDTH)


@triton.jit(do_not_specialize=["first", "K"])
def select_short(logits, last, out, width, first, K, WIDTH: tl.constexpr, N: tl.constexpr):
    row = tl.program_id(0)
    let_next_start()
    words = prepare()
    wait_for_previous()
    stop = tl.minimum(tl.load(last + row).to(tl.int32) + 1, width)
    line = logits + row.to(tl.int64) * width
    _select(words, out + row * K, line, 0, first, stop, width, K, WIDTH, N)


@triton.jit
def _meet(arrived, chunks):
    """Waits for all programs of the row. They come to run even where more are launched than fit:
    programs start in order, a row's lie side by side and are never more than multiprocessors, and
    dependent kernels start after the last has begun."""
    tl.debug_barrier()
    tl.atomic_add(arrived, 1, sem="release", scope="gpu")
    here = tl.atomic_add(arrived, 0, sem="acquire", scope="gpu")
    while here < chunks:
        here = tl.atomic_add(arrived, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()


@triton.jit(do_not_specialize=["first", "K"])
def select_long(
    logits, last, hist, state, listed, over, out, width, first, K,
    WIDTH: tl.constexpr, N: tl.constexpr, SAMPLE: tl.constexpr, CHUNKS: tl.constexpr,
    PHASE: tl.constexpr,
):  # fmt: skip
    """A program has N positions of a row. hist [rows, BINS] and state [rows, 8] are zero before and
    after: edges of the bins (2), counts above and in the bin (2), entries listed, arrivals (2).
    listed [rows, ROOM] int64; over [rows, chunks] counts above the bin.
    """
    chunk = tl.program_id(0)
    chunks = tl.num_programs(0)
    row = tl.program_id(1)
    i = tl.arange(0, N)
    let_next_start()
    words = prepare()
    wait_for_previous()
    stop = tl.minimum(tl.load(last + row).to(tl.int32) + 1, width)
    line = logits + row.to(tl.int64) * width
    target = out + row * K
    hist += row * BINS
    state += row * 8
    listed += row * ROOM
    over += row * chunks
    edges = state.to(tl.pointer_type(tl.float32))
    begin = chunk * N
    position = begin + i
    b = tl.arange(0, BINS)
    if stop - first <= N:
        if (chunk == 0) & ((PHASE == 0) | (PHASE == 1)):
            _select(words, target, line, first, first, stop, width, K, WIDTH, N)
    else:
        base = 0.0
        per_unit = 0.0
        if (PHASE == 0) | (PHASE == 1):
            span = stop - first
            s = tl.arange(0, SAMPLE)
            stride = span // SAMPLE
            # Somewhere in each stride, so that no period of the scores can meet it every time.
            jitter = ((s.to(tl.uint32) * 2654435761) >> 8).to(tl.int32) % tl.maximum(stride, 1)
            at = (s.to(tl.int64) * span // SAMPLE).to(tl.int32) + jitter + first
            low, high, _ = key_range(load_keys(line, at, first, stop))
            base, per_unit = _edges(low, high)
            # The k-th of a million lies beyond the largest of a sample of thousands now and then.
            per_unit *= 0.6666667
            keys = load_keys(line, position, first, stop)
            counted = count(words, _bins(keys, base, per_unit), keys != HIDDEN)
            n = counts(words, counted)
            tl.atomic_add(hist + (BINS - 1 - b), n, mask=n > 0, sem="relaxed")
            if chunk == 0:
                tl.store(edges, base)
                tl.store(edges + 1, per_unit)
                tl.store(state + 6, 0)
        if PHASE == 0:
            _meet(state + 5, chunks)
        above = 0
        within = 0
        if (PHASE == 0) | (PHASE == 2):
            if PHASE == 2:
                base = tl.load(edges)
                per_unit = tl.load(edges + 1)
            from_top = tl.load(hist + (BINS - 1 - b), cache_modifier=".cg")
            bin_, above, within = find(words, from_top, K)
            keys = load_keys(line, position, first, stop)
            place = _bins(keys, base, per_unit)
            here = (place == bin_) & (keys != HIDDEN) & (within <= ROOM)
            slot = tl.atomic_add(state + 4 + i * 0, 1, mask=here, sem="relaxed")
            tl.store(listed + slot, entry(keys, position), mask=here)
            mine_over = (place > bin_) & (keys != HIDDEN)
            tl.store(over + chunk, tl.sum(mine_over.to(tl.int32), 0))
            if chunk == 0:
                tl.store(state + 2, above)
                tl.store(state + 3, within)
        if PHASE == 0:
            _meet(state + 6, chunks)
        if (PHASE == 0) | (PHASE == 3):
            if PHASE == 3:
                above = tl.load(state + 2)
                within = tl.load(state + 3)
            if within > ROOM:
                if chunk == 0:
                    from_memory(target, line, first, stop, K, WIDTH, N)
            else:
                c = tl.arange(0, CHUNKS)
                earlier = tl.load(over + c, mask=c < chunk, other=0, cache_modifier=".cg")
                already = tl.sum(earlier, 0)
                r = tl.arange(0, ROOM)
                least = 1 - 9223372036854775807
                if within > 0:
                    inside = r < within
                    e = tl.load(listed + r, mask=inside, other=0, cache_modifier=".cg")
                    least = nth(words, e, inside, within, K - above)
                    mine = inside & (e >= least) & (key_and_position(e)[1] < begin)
                    already += tl.sum(mine.to(tl.int32), 0)
                keys = load_keys(line, position, first, stop)
                chosen = (keys != HIDDEN) & _reaches(keys, position, least)
                rank = tl.cumsum(chosen.to(tl.int32), 0)
                tl.store(target + already + rank - 1, position, mask=chosen)
                if (chunk == 0) & (within == 0) & (above < K):
                    pad(target, above, K, WIDTH)
            if chunk == 0:
                tl.store(hist + b, b * 0)
                tl.store(state + 4, 0)
                tl.store(state + 5, 0)
