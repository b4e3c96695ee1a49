# SPDX-License-Identifier: Apache-2.0
"""The k largest scores of a row in the Triton language, exact, ties to the lower position.

Scores become integer keys in the same order. A row that fits one CTA is held in registers; its
threshold is searched by counting at three pivots a pass, placed by interpolation between counts
already known. Longer rows go through four launches: a sample gives a threshold that surely leaves
more than k and few; chunks count what reaches it; chunks write that down in order; one CTA a row
selects among it. Where the sample misled (long ties, say) that CTA selects from the whole row
instead: slow and still exact. Which sample is read depends on the row's length alone, and the
result on the row alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..pdl import pdl
from ..triton_common import INTERPRET, let_next_start, wait_for_previous

SHORT = 8192  # positions that one CTA holds
CHUNK = 4096
_HIDDEN = tl.constexpr(-2147483648)  # the key of a place that is not there


@triton.jit
def _to_key(x):
    """Signed keys in the order of fp32 values; -0 counts as 0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _to_value(key):
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _load_keys(row, position, first, stop):
    inside = (position >= first) & (position < stop)
    x = tl.load(row + position, mask=inside, other=float("-inf"))
    return tl.where(x == float("-inf"), _HIDDEN, _to_key(x))


@triton.jit
def _extremes(a0, a1, a2, b0, b1, b2):
    return tl.minimum(a0, b0), tl.maximum(a1, b1), a2 + b2


@triton.jit
def _add2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _range(keys):
    """(least, largest, how many) of the keys that are there."""
    there = keys != _HIDDEN
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
    return _to_key(v0 * (1.0 - part) + v1 * part)


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
def _threshold(keys, least, largest, there, need, slack, TAIL: tl.constexpr):
    """(key, ties): take keys >= key where ties < 0, else keys > key and `ties` equal ones.

    `there` keys lie between least and largest, more than `need`. Up to `slack` too many will do.
    Interpolation takes counts as a line, or (TAIL) their logarithms: tails fall exponentially.
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
            v0 = _to_value(low.to(tl.int32))
            v1 = _to_value((high - 1).to(tl.int32))
            f0 = c0.to(tl.float32)
            f1 = tl.maximum(c1.to(tl.float32), 0.5)
            goal = need.to(tl.float32) + slack * 0.5
            margin = 0.6  # of a count, at least
            if TAIL:
                margin = 0.87 / goal
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
    over = tl.where(ties < 0, keys >= least, keys > least) & (keys != _HIDDEN)
    equal = (keys == least) & (ties >= 0) & (keys != _HIDDEN)
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
def _pad(out, count, K, WIDTH: tl.constexpr):
    i = tl.arange(0, WIDTH)
    tl.store(out + i, i * 0 - 1, mask=(i >= count) & (i < K))


@triton.jit
def _from_registers(out, keys, positions, K, WIDTH: tl.constexpr, TAIL: tl.constexpr):
    low, high, there = _range(keys)
    ties = there * 0 - 1
    if there > K:
        low, ties = _threshold(keys, low, high, there, there * 0 + K, 0, TAIL)
    count, _ = _compact(out, keys, positions, low, ties, there * 0, there * 0, K)
    _pad(out, count, K, WIDTH)


@triton.jit
def _from_memory(out, row, first, stop, K, WIDTH: tl.constexpr, N: tl.constexpr):
    """As _from_registers for a row of any length, read again for each pass of a plain bisection."""
    lane = tl.arange(0, N)
    counts = tl.zeros([N], tl.int32)
    for begin in range(0, stop, N):
        counts += (_load_keys(row, begin + lane, first, stop) != _HIDDEN).to(tl.int32)
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
            keys = _load_keys(row, begin + lane, first, stop)
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
        keys = _load_keys(row, begin + lane, first, stop)
        already, tied = _compact(out, keys, begin + lane, low.to(tl.int32), ties, already, tied, K)
    _pad(out, already, K, WIDTH)


@triton.jit(do_not_specialize=["first", "K"])
def select_short(
    logits, last, out, width, first,
    K, WIDTH: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    let_next_start()
    wait_for_previous()
    row = tl.program_id(0)
    stop = tl.minimum(tl.load(last + row).to(tl.int32) + 1, width)
    i = tl.arange(0, N)
    keys = _load_keys(logits + row.to(tl.int64) * width, i, first, stop)
    _from_registers(out + row * K, keys, i, K, WIDTH, False)


@triton.jit(do_not_specialize=["first"])
def sample(
    logits, last, least, width, first,
    N: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    """A key that well over K and at most SHORT of the row's keys reach, judged by N of them."""
    let_next_start()
    wait_for_previous()
    row = tl.program_id(0)
    stop = tl.minimum(tl.load(last + row).to(tl.int32) + 1, width)
    span = stop - first
    found = row * 0 + _HIDDEN
    if span > SHORT:
        i = tl.arange(0, N)
        stride = tl.maximum(span // N, 1)
        # Somewhere in each stride, so that no period of the scores can meet it every time.
        jitter = ((i.to(tl.uint32) * 2654435761) >> 8).to(tl.int32) % stride
        position = (i.to(tl.int64) * span // N).to(tl.int32) + jitter + first
        keys = _load_keys(logits + row.to(tl.int64) * width, position, first, stop)
        goal = tl.where(span > 262144, 4608, 4096)
        rank = (goal.to(tl.int64) * N // span).to(tl.int32)
        low, high, there = _range(keys)
        if there > rank:
            found, _ = _threshold(keys, low, high, there, rank, rank // 16, True)
    tl.store(least + row, found)


@triton.jit(do_not_specialize=["first", "chunks"])
def count_chunks(
    logits, last, least, counts, width, first, chunks,
    CHUNK: tl.constexpr,
):  # fmt: skip
    let_next_start()
    wait_for_previous()
    row = tl.program_id(1)
    chunk = tl.program_id(0)
    stop = tl.minimum(tl.load(last + row).to(tl.int32) + 1, width)
    count = row * 0
    if chunk * CHUNK < stop:
        position = chunk * CHUNK + tl.arange(0, CHUNK)
        keys = _load_keys(logits + row.to(tl.int64) * width, position, first, stop)
        count = tl.sum(((keys >= tl.load(least + row)) & (keys != _HIDDEN)).to(tl.int32), 0)
    tl.store(counts + row * chunks + chunk, count)


@triton.jit(do_not_specialize=["first", "chunks"])
def collect(
    logits, last, least, counts, values, positions, width, first, chunks,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    let_next_start()
    wait_for_previous()
    row = tl.program_id(1)
    chunk = tl.program_id(0)
    if tl.load(counts + row * chunks + chunk) > 0:
        c = tl.arange(0, CHUNKS)
        found = tl.load(counts + row * chunks + c, mask=c < chunks, other=0)
        if tl.sum(found, 0) <= SHORT:
            before = tl.sum(tl.where(c < chunk, found, 0), 0)
            stop = tl.minimum(tl.load(last + row).to(tl.int32) + 1, width)
            position = chunk * CHUNK + tl.arange(0, CHUNK)
            keys = _load_keys(logits + row.to(tl.int64) * width, position, first, stop)
            taken = (keys >= tl.load(least + row)) & (keys != _HIDDEN)
            place = before + tl.cumsum(taken.to(tl.int32), 0) - 1
            tl.store(values + row * SHORT + place, keys, mask=taken)
            tl.store(positions + row * SHORT + place, position, mask=taken)


@triton.jit(do_not_specialize=["first", "chunks", "K"])
def finish(
    logits, last, counts, values, positions, out, width, first, chunks,
    K, CHUNKS: tl.constexpr, WIDTH: tl.constexpr,
    N: tl.constexpr, WALK: tl.constexpr,
):  # fmt: skip
    let_next_start()
    wait_for_previous()
    row = tl.program_id(0)
    stop = tl.minimum(tl.load(last + row).to(tl.int32) + 1, width)
    c = tl.arange(0, CHUNKS)
    total = tl.sum(tl.load(counts + row * chunks + c, mask=c < chunks, other=0), 0)
    if (total <= N) & ((total >= K) | (stop - first <= N)):
        i = tl.arange(0, N)
        keys = tl.load(values + row * N + i, mask=i < total, other=_HIDDEN)
        position = tl.load(positions + row * N + i, mask=i < total, other=0)
        _from_registers(out + row * K, keys, position, K, WIDTH, True)
    else:
        _from_memory(out + row * K, logits + row.to(tl.int64) * width, first, stop, K, WIDTH, WALK)


def unserved(logits: torch.Tensor, k: int) -> dict[str, object]:
    """Dimensions that the kernels do not serve."""
    wrong: dict[str, object] = {}
    if k > SHORT:
        wrong["k"] = k
    if logits.dtype != torch.float32:
        wrong["dtype"] = logits.dtype
    return wrong


def topk_select(
    logits: torch.Tensor, k: int, last: torch.Tensor | None, first: int
) -> torch.Tensor:
    """As the operator, for k up to 8192."""
    assert logits.is_contiguous(), logits.stride()
    rows, width = logits.shape
    k = min(k, width)
    device = logits.device
    out = torch.empty(rows, k, dtype=torch.int32, device=device)
    if last is None:
        last = torch.full((rows,), width - 1, dtype=torch.int64, device=device)
    shape = {"K": k, "WIDTH": 2048 if k <= 2048 else SHORT}
    if rows == 0:
        return out
    if width <= SHORT:
        n = 2048 if width <= 2048 else SHORT
        select_short[(rows,)](
            logits,
            last,
            out,
            width,
            first,
            **shape,
            N=n,
            num_warps=4 if n == 2048 else 8,
            **pdl(),
        )
        return out
    chunks = triton.cdiv(width, CHUNK)
    many = 32 if chunks <= 32 else max(256, triton.next_power_of_2(chunks))
    least = torch.empty(rows, dtype=torch.int32, device=device)
    counts = torch.empty(rows, chunks, dtype=torch.int32, device=device)
    values = torch.empty(rows, SHORT, dtype=torch.int32, device=device)
    positions = torch.empty(rows, SHORT, dtype=torch.int32, device=device)
    sample[(rows,)](
        logits, last, least, width, first, N=16384 if width > 1 << 17 else 4096,
        SHORT=SHORT, num_warps=16, **pdl(),
    )  # fmt: skip
    count_chunks[(chunks, rows)](
        logits, last, least, counts, width, first, chunks, CHUNK=CHUNK, num_warps=4, **pdl()
    )
    collect[(chunks, rows)](
        logits, last, least, counts, values, positions, width, first, chunks,
        CHUNKS=many, CHUNK=CHUNK, SHORT=SHORT, num_warps=8, maxnreg=64, **pdl(),
    )  # fmt: skip
    finish[(rows,)](
        logits, last, counts, values, positions, out, width, first, chunks,
        CHUNKS=many, **shape, N=SHORT, WALK=2 * CHUNK, num_warps=8, **pdl(),
    )  # fmt: skip
    return out
