# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""Top-k of many long rows, in four launches.

A sample gives a threshold that surely leaves more than k and few; chunks count what reaches it;
chunks write that down in order; one CTA a row selects among it. Where the sample misled (long ties,
say) that CTA selects from the whole row instead. Which sample is read depends on the row's length
alone, and the result on the row alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_common import let_next_start, wait_for_previous
from .search import HIDDEN, from_memory, from_registers, key_range, load_keys, threshold


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
    found = row * 0 + HIDDEN
    if span > SHORT:
        i = tl.arange(0, N)
        stride = tl.maximum(span // N, 1)
        # Somewhere in each stride, so that no period of the scores can meet it every time.
        jitter = ((i.to(tl.uint32) * 2654435761) >> 8).to(tl.int32) % stride
        position = (i.to(tl.int64) * span // N).to(tl.int32) + jitter + first
        keys = load_keys(logits + row.to(tl.int64) * width, position, first, stop)
        goal = tl.where(span > 262144, 4608, 4096)
        rank = (goal.to(tl.int64) * N // span).to(tl.int32)
        low, high, there = key_range(keys)
        if there > rank:
            found, _ = threshold(keys, low, high, there, rank, rank // 16)
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
        keys = load_keys(logits + row.to(tl.int64) * width, position, first, stop)
        count = tl.sum(((keys >= tl.load(least + row)) & (keys != HIDDEN)).to(tl.int32), 0)
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
            keys = load_keys(logits + row.to(tl.int64) * width, position, first, stop)
            taken = (keys >= tl.load(least + row)) & (keys != HIDDEN)
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
        keys = tl.load(values + row * N + i, mask=i < total, other=HIDDEN)
        position = tl.load(positions + row * N + i, mask=i < total, other=0)
        from_registers(out + row * K, keys, position, K, WIDTH)
    else:
        from_memory(out + row * K, logits + row.to(tl.int64) * width, first, stop, K, WIDTH, WALK)
