# SPDX-License-Identifier: Apache-2.0
"""The k largest scores of a row in the Triton language, exact, ties to the lower position.

Scores become unsigned keys in the same order. A row that fits one CTA is held in registers and its
threshold found four bits at a time by counting. Longer rows go through four launches: a sample
gives a threshold that surely leaves more than k and few; chunks count what reaches it; chunks write
that down in order; one CTA a row selects among it. Where the sample misled (long ties, say) that
CTA selects from the whole row instead: slow and still exact. Which sample is read depends on the
row's length alone, and the result on the row alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..triton_common import INTERPRET

SHORT = 8192  # positions that one CTA holds
SAMPLE = 16384
CHUNK = 8192


@triton.jit
def _keys(x):
    """Unsigned keys in the order of fp32 scores; 0 for -inf (hidden), -0 counts as 0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, ~bits, bits | -2147483648).to(tl.uint32, bitcast=True)
    return tl.where(x == float("-inf"), 0, key)


@triton.jit
def _load_keys(row, position, first, stop):
    inside = (position >= first) & (position < stop)
    return _keys(tl.load(row + position, mask=inside, other=float("-inf")))


@triton.jit
def _add4(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def _count16(keys, prefix, shift, N: tl.constexpr):
    """How many keys with the given bits above have each of the 16 next digits.

    Digit 4 f + w is counted in the 16-bit field f of word w; N <= 65535 / 4 * 4.
    """
    # Digits are counted as nibbles of a word, four keys at a time (one thread's), then widened.
    # `>> shift >> 4`, because shift + 4 may be the key's whole width.
    mine = ((keys >> shift) >> 4) == prefix
    digit = ((keys >> shift) & 15).to(tl.int64)
    one = tl.where(mine & (keys != 0), tl.full([N], 1, tl.int64) << (digit * 4), 0)
    four = tl.sum(tl.reshape(one, [N // 4, 4]), 1)
    field = 0x000F000F000F000F
    w0 = four & field
    w1 = (four >> 4) & field
    w2 = (four >> 8) & field
    w3 = (four >> 12) & field
    if INTERPRET:  # which walks through a reduction of our own in Python
        return tl.sum(w0, 0), tl.sum(w1, 0), tl.sum(w2, 0), tl.sum(w3, 0)
    else:
        return tl.reduce((w0, w1, w2, w3), 0, _add4)


@triton.jit
def _visit(word, field, number, need, above, digit, larger, here):
    """One digit on the way down from 15: notes it if the need-th largest key lies in it."""
    count = ((word >> (field * 16)) & 0xFFFF).to(tl.int32)
    hit = (above < need) & (above + count >= need)
    digit = tl.where(hit, number, digit)
    larger = tl.where(hit, above, larger)
    here = tl.where(hit, count, here)
    return above + count, digit, larger, here


@triton.jit
def _next_digit(c0, c1, c2, c3, need):
    """The digit in which the need-th largest key lies, how many have a larger one, how many it."""
    above = need * 0
    digit = need * 0
    larger = need * 0
    here = need * 0
    for up in tl.static_range(4):
        f = 3 - up
        above, digit, larger, here = _visit(c3, f, 4 * f + 3, need, above, digit, larger, here)
        above, digit, larger, here = _visit(c2, f, 4 * f + 2, need, above, digit, larger, here)
        above, digit, larger, here = _visit(c1, f, 4 * f + 1, need, above, digit, larger, here)
        above, digit, larger, here = _visit(c0, f, 4 * f, need, above, digit, larger, here)
    return digit, larger, here


@triton.jit
def _threshold(keys, need, stop_shift, N: tl.constexpr):
    """(least, ties): take keys >= least where ties < 0, else keys > least and `ties` equal ones.

    needs more than `need` nonzero keys. Stops early once a digit boundary splits them right, or at
    `stop_shift`, where everything in the last digit is taken.
    """
    prefix = need.to(tl.uint32) * 0
    shift = need * 0 + 28
    ties = need * 0
    while shift >= stop_shift:
        c0, c1, c2, c3 = _count16(keys, prefix, shift.to(tl.uint32), N)
        digit, larger, here = _next_digit(c0, c1, c2, c3, need)
        prefix = (prefix << 4) | digit.to(tl.uint32)
        need -= larger
        ties = need
        if (here == need) | (shift == stop_shift):
            ties = tl.where((here == need) | (stop_shift > 0), -1, need)
            prefix = prefix << shift.to(tl.uint32)
            shift = need * 0 - 1
        else:
            shift -= 4
    return prefix, ties


@triton.jit
def _compact(out, keys, positions, least, ties, already, tied_already, K: tl.constexpr):
    """Writes the selected positions in order behind `already`; returns the new two counts."""
    over = tl.where(ties < 0, keys >= least, keys > least) & (keys != 0)
    equal = (keys == least) & (ties >= 0) & (keys != 0)
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
def _pad(out, count, K: tl.constexpr, WIDTH: tl.constexpr):
    i = tl.arange(0, WIDTH)
    tl.store(out + i, i * 0 - 1, mask=(i >= count) & (i < K))


@triton.jit
def _from_registers(out, keys, positions, K: tl.constexpr, WIDTH: tl.constexpr, N: tl.constexpr):
    there = tl.sum((keys != 0).to(tl.int32), 0)
    least = (there * 0).to(tl.uint32)
    ties = there * 0 - 1
    if there > K:
        least, ties = _threshold(keys, there * 0 + K, 0, N)
    count, _ = _compact(out, keys, positions, least, ties, there * 0, there * 0, K)
    _pad(out, count, K, WIDTH)


@triton.jit
def _from_memory(out, row, first, stop, K: tl.constexpr, WIDTH: tl.constexpr, N: tl.constexpr):
    """As _from_registers for a row of any length, read again for each digit."""
    lane = tl.arange(0, N)
    need = stop * 0 + K
    prefix = need.to(tl.uint32) * 0
    shift = need * 0 + 28
    ties = need * 0
    while shift >= 0:
        counts = tl.zeros([16], tl.int32)
        digits = tl.arange(0, 16)
        for begin in range(0, stop, N):
            keys = _load_keys(row, begin + lane, first, stop)
            c0, c1, c2, c3 = _count16(keys, prefix, shift.to(tl.uint32), N)
            part = tl.where(digits % 4 == 0, c0, tl.where(digits % 4 == 1, c1, tl.where(
                digits % 4 == 2, c2, c3)))  # fmt: skip
            counts += ((part >> ((digits // 4) * 16).to(tl.int64)) & 0xFFFF).to(tl.int32)
        larger = tl.sum(counts, 0) - tl.cumsum(counts, 0)
        hit = (larger < need) & (larger + counts >= need)
        if tl.sum(hit.to(tl.int32), 0) == 0:  # no more than K there: take all
            prefix = need.to(tl.uint32) * 0
            ties = need * 0 - 1
            shift = need * 0 - 1
        else:
            prefix = (prefix << 4) | tl.sum(tl.where(hit, digits, 0), 0).to(tl.uint32)
            need -= tl.sum(tl.where(hit, larger, 0), 0)
            ties = need
            shift -= 4
    already = need * 0
    tied = need * 0
    for begin in range(0, stop, N):
        keys = _load_keys(row, begin + lane, first, stop)
        already, tied = _compact(out, keys, begin + lane, prefix, ties, already, tied, K)
    _pad(out, already, K, WIDTH)


@triton.jit(do_not_specialize=["first"])
def select_short(
    logits, last, out, width, first,
    LAST: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    stop = width
    if LAST:
        stop = tl.minimum(tl.load(last + row).to(tl.int32) + 1, width)
    i = tl.arange(0, N)
    keys = _load_keys(logits + row.to(tl.int64) * width, i, first, stop)
    _from_registers(out + row * K, keys, i, K, WIDTH, N)


@triton.jit(do_not_specialize=["first"])
def sample(logits, last, least, width, first, LAST: tl.constexpr, N: tl.constexpr, SHORT: tl.constexpr):
    """A key that well over K and at most SHORT of the row's keys reach, judged by N of them."""
    row = tl.program_id(0)
    stop = width
    if LAST:
        stop = tl.minimum(tl.load(last + row).to(tl.int32) + 1, width)
    span = stop - first
    found = (row * 0).to(tl.uint32)
    if span > SHORT:
        i = tl.arange(0, N)
        stride = tl.maximum(span // N, 1)
        # Somewhere in each stride, so that no period of the scores can meet it every time.
        jitter = ((i.to(tl.uint32) * 2654435761) >> 8).to(tl.int32) % stride
        position = (i.to(tl.int64) * span // N).to(tl.int32) + jitter + first
        keys = _load_keys(logits + row.to(tl.int64) * width, position, first, stop)
        goal = tl.where(span > 262144, 4608, 4096)
        rank = (goal.to(tl.int64) * N // span).to(tl.int32)
        if tl.sum((keys != 0).to(tl.int32), 0) > rank:
            found, _ = _threshold(keys, rank, 16, N)
    tl.store(least + row, found)


@triton.jit(do_not_specialize=["first", "chunks"])
def count_chunks(
    logits, last, least, counts, width, first, chunks,
    LAST: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1)
    chunk = tl.program_id(0)
    stop = width
    if LAST:
        stop = tl.minimum(tl.load(last + row).to(tl.int32) + 1, width)
    count = row * 0
    if chunk * CHUNK < stop:
        position = chunk * CHUNK + tl.arange(0, CHUNK)
        keys = _load_keys(logits + row.to(tl.int64) * width, position, first, stop)
        count = tl.sum(((keys >= tl.load(least + row)) & (keys != 0)).to(tl.int32), 0)
    tl.store(counts + row * chunks + chunk, count)


@triton.jit(do_not_specialize=["first", "chunks"])
def collect(
    logits, last, least, counts, values, positions, width, first, chunks,
    LAST: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1)
    chunk = tl.program_id(0)
    if tl.load(counts + row * chunks + chunk) > 0:
        c = tl.arange(0, CHUNKS)
        found = tl.load(counts + row * chunks + c, mask=c < chunks, other=0)
        if tl.sum(found, 0) <= SHORT:
            before = tl.sum(tl.where(c < chunk, found, 0), 0)
            stop = width
            if LAST:
                stop = tl.minimum(tl.load(last + row).to(tl.int32) + 1, width)
            position = chunk * CHUNK + tl.arange(0, CHUNK)
            keys = _load_keys(logits + row.to(tl.int64) * width, position, first, stop)
            taken = (keys >= tl.load(least + row)) & (keys != 0)
            place = before + tl.cumsum(taken.to(tl.int32), 0) - 1
            tl.store(values + row * SHORT + place, keys, mask=taken)
            tl.store(positions + row * SHORT + place, position, mask=taken)


@triton.jit(do_not_specialize=["first", "chunks"])
def finish(
    logits, last, counts, values, positions, out, width, first, chunks,
    LAST: tl.constexpr, CHUNKS: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr,
    N: tl.constexpr, WALK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    stop = width
    if LAST:
        stop = tl.minimum(tl.load(last + row).to(tl.int32) + 1, width)
    c = tl.arange(0, CHUNKS)
    total = tl.sum(tl.load(counts + row * chunks + c, mask=c < chunks, other=0), 0)
    if (total <= N) & ((total >= K) | (stop - first <= N)):
        i = tl.arange(0, N)
        keys = tl.load(values + row * N + i, mask=i < total, other=0)
        position = tl.load(positions + row * N + i, mask=i < total, other=0)
        _from_registers(out + row * K, keys, position, K, WIDTH, N)
    else:
        _from_memory(out + row * K, logits + row.to(tl.int64) * width, first, stop, K, WIDTH, WALK)


def topk_select(
    logits: torch.Tensor, k: int, last: torch.Tensor | None, first: int
) -> torch.Tensor:
    """As the operator, for k up to 8192."""
    assert logits.is_contiguous(), logits.stride()
    assert logits.dtype == torch.float32, logits.dtype
    assert k <= SHORT, k
    rows, width = logits.shape
    k = min(k, width)
    device = logits.device
    out = torch.empty(rows, k, dtype=torch.int32, device=device)
    limits = logits if last is None else last
    shared = {"LAST": last is not None}
    shape = {"K": k, "WIDTH": triton.next_power_of_2(k)}
    if rows == 0:
        return out
    if width <= SHORT:
        n = 2048 if width <= 2048 else SHORT
        select_short[(rows,)](
            logits, limits, out, width, first, **shared, **shape, N=n, num_warps=n // 1024
        )
        return out
    chunks = triton.cdiv(width, CHUNK)
    many = triton.next_power_of_2(chunks)
    least = torch.empty(rows, dtype=torch.uint32, device=device)
    counts = torch.empty(rows, chunks, dtype=torch.int32, device=device)
    values = torch.empty(rows, SHORT, dtype=torch.uint32, device=device)
    positions = torch.empty(rows, SHORT, dtype=torch.int32, device=device)
    sample[(rows,)](
        logits, limits, least, width, first, **shared, N=SAMPLE, SHORT=SHORT, num_warps=16
    )
    count_chunks[(chunks, rows)](
        logits, limits, least, counts, width, first, chunks, **shared, CHUNK=CHUNK, num_warps=8
    )
    collect[(chunks, rows)](
        logits, limits, least, counts, values, positions, width, first, chunks, **shared,
        CHUNKS=many, CHUNK=CHUNK, SHORT=SHORT, num_warps=8,
    )  # fmt: skip
    finish[(rows,)](
        logits, limits, counts, values, positions, out, width, first, chunks, **shared,
        CHUNKS=many, **shape, N=SHORT, WALK=CHUNK, num_warps=8,
    )  # fmt: skip
    return out
