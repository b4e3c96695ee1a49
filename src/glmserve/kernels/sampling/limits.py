# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""Where top-k, top-p and min-p cut a row: the largest distance (reference.py) that may be drawn.

A distance has 22 bits. The upper 11 are counted over all tokens, the lower 11 of the one bin in
which a limit falls: one such bin for top-k, and one more for top-p where it is another. Each
histogram element holds a count and a mass; ranks add theirs up. Rows without limits cost a look.
"""

import triton
import triton.language as tl

from ..triton_common import let_next_start, wait_for_previous
from .arithmetic import (
    STEPS,
    distances,
    inverse_of,
    masses,
    min_p_steps,
)
from .kernel import largest_of, value_in

BINS = tl.constexpr(1 << 11)
# A histogram's element: a count above, below it a mass of up to 2^18 tokens of 2^28 each.
COUNT_SHIFT = tl.constexpr(46)
ONE_COUNT = tl.constexpr(1 << 46)
MASS_MASK = tl.constexpr((1 << 46) - 1)
COUNT_MASK = tl.constexpr((1 << 18) - 1)
BIN, BEFORE, TARGET, CUT = (tl.constexpr(i) for i in range(4))  # a row's search, int64


@triton.jit(do_not_specialize=["valid", "blocks", "ranks", "lines", "upper"])
def count_steps(
    logits, temperature, top_k, top_p, min_p, rows, largest, search, sums,
    temperature_stride, top_k_stride, top_p_stride, min_p_stride,
    width, first, valid, blocks, ranks, lines, upper, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (splits, rows): adds to sums [rows, BINS], by the upper bits or the searched lower."""
    let_next_start()
    wait_for_previous()
    row = tl.program_id(1)
    line = tl.load(rows + row).to(tl.int64)
    t = tl.load(temperature + line * temperature_stride).to(tl.float32)
    if upper:
        k = tl.load(top_k + line * top_k_stride)
        p = tl.load(top_p + line * top_p_stride)
        wanted = tl.where((t > 0) & ((k > 0) | (p < 1)), 0, -1)
    else:
        wanted = tl.load(search + row * 4 + BIN).to(tl.int32)
    if wanted >= 0:
        bound = min_p_steps(tl.load(min_p + line * min_p_stride))
        inverse = inverse_of(t)
        row_max = value_in(largest_of(largest, row, ranks, lines)) * inverse
        start = tl.program_id(0) * blocks * BLOCK
        for block in range(blocks):
            column = start + block * BLOCK + tl.arange(0, BLOCK)
            inside = (column < width) & (first + column < valid)
            x = tl.load(logits + row.to(tl.int64) * width + column, mask=inside, other=0.0)
            distance = distances(x * inverse, row_max)
            taken = inside & (distance <= bound)  # a bound lies within the grid
            digit = distance >> 11
            if upper == 0:
                taken = taken & (digit == wanted)
                digit = distance & (BINS - 1)
            weight = masses(distance).to(tl.int64) + ONE_COUNT
            tl.atomic_add(sums + row.to(tl.int64) * BINS + digit, weight, mask=taken, sem="relaxed")


@triton.jit
def _sums(sums, row, ranks, lines):
    """Counts and masses [BINS] over all ranks."""
    i = tl.arange(0, BINS)
    total = tl.load(sums + row * BINS + i)
    for rank in range(1, ranks):
        total += tl.load(sums + (rank * lines + row) * BINS + i)
    mass = total & MASS_MASK
    return (total >> COUNT_SHIFT) & COUNT_MASK, mass


@triton.jit
def _reach(sums, before, target):
    below = tl.cumsum(sums, 0) + before < target
    digit = tl.minimum(tl.sum(below.to(tl.int32), 0), BINS - 1)
    earlier = tl.where(tl.arange(0, BINS) < digit, sums, 0)
    return digit, before + tl.sum(earlier, 0)


@triton.jit
def _target(p, total):
    """The least mass that is at least p of the total."""
    goal = tl.ceil(p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
    return tl.maximum(tl.minimum(goal, total), 1)


@triton.jit(do_not_specialize=["ranks", "lines"])
def choose_bin(
    temperature, top_k, top_p, rows, sums, search,
    temperature_stride, top_k_stride, top_p_stride, ranks, lines,
):  # fmt: skip
    """Grid (rows,): the bin in which top-k falls, or without it top-p."""
    let_next_start()
    wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    line = tl.load(rows + row).to(tl.int64)
    t = tl.load(temperature + line * temperature_stride)
    k = tl.load(top_k + line * top_k_stride).to(tl.int64)
    p = tl.load(top_p + line * top_p_stride)
    state = search + row * 4
    tl.store(state + CUT, STEPS - 1)
    if (t > 0) & ((k > 0) | (p < 1)):
        count, mass = _sums(sums, row, ranks, lines)
        if k > 0:
            digit, before = _reach(count, k * 0, k)
            tl.store(state + BIN, digit)
            tl.store(state + BEFORE, before)
        else:
            target = _target(p, tl.sum(mass, 0))
            digit, before = _reach(mass, k * 0, target)
            tl.store(state + BIN, digit)
            tl.store(state + BEFORE, before)
            tl.store(state + TARGET, target)
    else:
        tl.store(state + BIN, -1)


@triton.jit(do_not_specialize=["ranks", "lines"])
def choose_step(
    top_k, top_p, rows, upper, lower, search, top_k_stride, top_p_stride, ranks, lines,
):  # fmt: skip
    """Grid (rows,): the cut, or, where top-p falls into an earlier bin than top-k, that bin."""
    let_next_start()
    wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    line = tl.load(rows + row).to(tl.int64)
    state = search + row * 4
    bin = tl.load(state + BIN)
    if bin >= 0:
        k = tl.load(top_k + line * top_k_stride).to(tl.int64)
        p = tl.load(top_p + line * top_p_stride)
        before = tl.load(state + BEFORE)
        count, mass = _sums(lower, row, ranks, lines)
        next_bin = bin * 0 - 1
        if k > 0:
            digit, _before = _reach(count, before, k)
            cut = bin * BINS + digit
            if p < 1:
                i = tl.arange(0, BINS)
                kept = tl.where(i <= digit, mass, 0)
                _number, above = _sums(upper, row, ranks, lines)
                above = tl.where(i < bin, above, 0) + tl.where(i == bin, tl.sum(kept, 0), 0)
                target = _target(p, tl.sum(above, 0))
                p_bin, p_before = _reach(above, k * 0, target)
                if p_bin == bin:
                    p_digit, _before = _reach(kept, p_before, target)
                    cut = bin * BINS + p_digit
                else:
                    next_bin = p_bin.to(tl.int64)
                    tl.store(state + BEFORE, p_before)
                    tl.store(state + TARGET, target)
        else:
            digit, _before = _reach(mass, before, tl.load(state + TARGET))
            cut = bin * BINS + digit
        tl.store(state + BIN, next_bin)
        tl.store(state + CUT, cut)


@triton.jit(do_not_specialize=["ranks", "lines"])
def finish_cuts(
    temperature, top_k, top_p, min_p, rows, last, search, cuts, own_upper, own_lower, own_last,
    temperature_stride, top_k_stride, top_p_stride, min_p_stride, ranks, lines,
):  # fmt: skip
    """Grid (rows,): cuts [rows] int32; clears what this rank counted for the next step."""
    let_next_start()
    wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    line = tl.load(rows + row).to(tl.int64)
    t = tl.load(temperature + line * temperature_stride)
    k = tl.load(top_k + line * top_k_stride)
    p = tl.load(top_p + line * top_p_stride)
    cut = tl.full([], STEPS, tl.int32)
    if t > 0:
        state = search + row * 4
        bin = tl.load(state + BIN)
        found = tl.load(state + CUT)
        zeros = tl.zeros([BINS], tl.int64)
        i = row * BINS + tl.arange(0, BINS)
        if bin >= 0:
            _count, mass = _sums(last, row, ranks, lines)
            digit, _before = _reach(mass, tl.load(state + BEFORE), tl.load(state + TARGET))
            found = tl.minimum(found, bin * BINS + digit)
            tl.debug_barrier()
            tl.store(own_last + i, zeros)
        if (k > 0) | (p < 1):
            tl.store(own_upper + i, zeros)
            tl.store(own_lower + i, zeros)
        m = tl.load(min_p + line * min_p_stride)
        if (k > 0) | (p < 1) | (m > 0):
            cut = tl.minimum(found.to(tl.int32), min_p_steps(m))
    tl.store(cuts + row, cut)
