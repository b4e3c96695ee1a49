# SPDX-License-Identifier: Apache-2.0
"""All-reduce + residual + RMSNorm over peers' memory, one kernel: one-shot and two-shot.

Every rank publishes its partial sums in a buffer that its peers can read, raises a flag at each
peer, and waits for theirs. Flags hold the number of the launch, which lives in device memory, so
that a CUDA graph can be replayed; the buffers alternate from launch to launch, so a rank that runs
ahead writes into the one that nobody reads any more. Sums go in rank order, hence the same bits
everywhere.
"""

import triton
import triton.language as tl

from ..quantise.kernel import quantise_groups
from ..residual_norm.kernel import norm_tile
from ..triton_common import let_next_start, to_bf16, wait_for_previous

GROUP = tl.constexpr(128)
# Phases of a launch. The interpreter runs ranks one after the other, so it takes them singly.
ALL, PUBLISH, EXCHANGE, FINISH = (tl.constexpr(i) for i in range(4))


@triton.jit
def _peer(table, rank, dtype: tl.constexpr):
    # Without the promise every access would be two bytes wide.
    address = tl.multiple_of(tl.load(table + rank), 16)
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit
def _peers(table, dtype: tl.constexpr, WORLD: tl.constexpr):
    """Every rank's address."""
    addresses = (_peer(table, 0, dtype),)
    for rank in tl.static_range(1, WORLD):
        addresses = addresses + (_peer(table, rank, dtype),)  # noqa: RUF005
    return addresses


@triton.jit
def _raise_flags(peers, place, launch, RANK: tl.constexpr, WORLD: tl.constexpr):
    """Tells every peer, at flags [WORLD], that this program's data of this launch are there."""
    tl.debug_barrier()  # all threads' stores come before the release below
    tl.atomic_xchg(peers + place * WORLD + RANK, launch, sem="release", scope="sys")


@triton.jit
def _await_flags(mine, launch):
    """Waits until every flag of `mine` [WORLD] has this launch's number."""
    # Differences survive the counter's wrap; a tensor carried by the loop would not compile.
    lag = tl.min(tl.atomic_add(mine, 0, sem="acquire", scope="sys") - launch, 0)
    while lag < 0:
        lag = tl.min(tl.atomic_add(mine, 0, sem="acquire", scope="sys") - launch, 0)
    tl.debug_barrier()  # no thread reads peers' data before


@triton.jit
def _leave(state, launch):
    """The last program of a launch counts it. Relaxed: a program is here once it has used what it
    read of the state, and the next launch looks after the end of this one."""
    if tl.num_programs(0) == 1:
        tl.store(state, launch)
    elif tl.atomic_add(state + 1, 1, sem="relaxed") == tl.num_programs(0) - 1:
        tl.store(state + 1, 0)
        tl.store(state, launch)


@triton.jit
def _row(source, row, rows, width, column):
    """A row, zeros beyond the last."""
    return tl.load(source + row * width + column, mask=(column < width) & (row < rows), other=0.0)


@triton.jit
def _sum_of_ranks(buffers, at, inside, own, RANK: tl.constexpr, WORLD: tl.constexpr):
    """Elements `at` of every rank's buffer, fp32; this rank's are `own`. Volatile: all are asked
    for before one is used, and peers wrote behind our L1's back."""
    parts = ()
    for rank in tl.static_range(WORLD):
        if rank == RANK:
            parts = parts + (own,)  # noqa: RUF005
        else:
            part = tl.load(buffers[rank] + at, mask=inside, other=0.0, volatile=True)
            parts = parts + (part,)  # noqa: RUF005
    total = parts[0].to(tl.float32)
    for rank in tl.static_range(1, WORLD):
        total += parts[rank].to(tl.float32)
    return total


@triton.jit
def _finish_row(
    tile, row, rows, at, inside, gain, normed, values, scales, width, eps,
    GROUPS: tl.constexpr, QUANTISE: tl.constexpr,
):  # fmt: skip
    """Norms a row of sums, and leaves it in fp8 as well where something reads it so."""
    result = to_bf16(norm_tile(tile, gain.to(tl.float32), width, eps))
    tl.store(normed + at, result, mask=inside)
    if QUANTISE:
        group = tl.arange(0, GROUPS)
        quantised, scale = quantise_groups(result.to(tl.float32))
        tl.store(tl.max_contiguous(values + at, (1, 8)), quantised, mask=inside)
        tl.store(scales + group * rows + row, scale, mask=group * GROUP < width)


@triton.jit(do_not_specialize=["rows"])
def one_shot(
    x,
    buffers,
    signals,
    state,
    residual,
    weight,
    normed,
    total,
    values,
    scales,
    rows,
    width,
    capacity,
    eps,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    GROUPS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    QUANTISE: tl.constexpr,
    PHASE: tl.constexpr,
):
    """Every rank reads every rank's rows. x, residual, normed, total [rows, width] bf16; values and
    scales as `QuantRows`.

    buffers, signals [WORLD] int64: addresses of each rank's [2, capacity] bf16 and flags
    [programs, WORLD] int32, all zero at first; state [2] int32: launches done, programs done.
    Programs must all be resident at once: a program waits for its peers of the same number.
    """
    let_next_start()
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    column = tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = column < width
    # Known before the step: behind the exchange they would be waited for.
    gain = tl.load(weight + column, mask=inside, other=0.0)
    peers = tl.load(signals + tl.arange(0, WORLD)).to(tl.pointer_type(tl.int32))
    flags = tl.load(signals + RANK).to(tl.pointer_type(tl.int32))
    flags += pid * WORLD + tl.arange(0, WORLD)
    parts = _peers(buffers, tl.bfloat16, WORLD)
    wait_for_previous()
    # Before the launch's number is looked at; what is our own stays in registers.
    own = _row(x, pid, rows, width, column)
    stream = own
    if RESIDUAL:
        stream = _row(residual, pid, rows, width, column)
    launch = tl.load(state) + 1
    half = (launch & 1) * capacity
    if PHASE == ALL or PHASE == PUBLISH:  # noqa: SIM109
        target = parts[RANK]
        tl.store(target + (half + pid * width + column), own, mask=inside & (pid < rows))
        for row in tl.range(pid + programs, rows, programs):
            at = row * width + column
            tl.store(target + (half + at), tl.load(x + at, mask=inside), mask=inside)
        _raise_flags(peers, pid, launch, RANK, WORLD)
    if PHASE == ALL or PHASE == FINISH:  # noqa: SIM109
        _await_flags(flags, launch)
        for row in tl.range(pid, rows, programs):
            at = row * width + column
            tile = _sum_of_ranks(parts, half + at, inside, own, RANK, WORLD)
            if RESIDUAL:
                tile += stream.to(tl.float32)
                stream = _row(residual, row + programs, rows, width, column)
            own = _row(x, row + programs, rows, width, column)
            rounded = to_bf16(tile)
            tl.store(total + at, rounded, mask=inside)
            _finish_row(
                rounded.to(tl.float32), row, rows, at, inside, gain, normed, values,
                scales, width, eps, GROUPS, QUANTISE,
            )  # fmt: skip
        _leave(state, launch)


@triton.jit(do_not_specialize=["rows"])
def two_shot(
    x,
    buffers,
    signals,
    state,
    residual,
    weight,
    normed,
    total,
    values,
    scales,
    rows,
    width,
    capacity,
    eps,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    GROUPS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    QUANTISE: tl.constexpr,
    PHASE: tl.constexpr,
):
    """Each rank sums its share of the rows and hands the rounded sums to all: for many rows.

    The sums lie behind the partials, buffers being [4, capacity] bf16 and flags [2, programs,
    WORLD]. A program has the same rows in every phase, so it waits for the peers' programs of its
    own number only; the ranks sum its rows in turn. The bits are those of `one_shot`.
    """
    let_next_start()
    programs = tl.num_programs(0)
    pid = tl.program_id(0)
    column = tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = column < width
    # Known before the step: behind the exchange they would be waited for.
    gain = tl.load(weight + column, mask=inside, other=0.0)
    peers = tl.load(signals + tl.arange(0, WORLD)).to(tl.pointer_type(tl.int32))
    flags = tl.load(signals + RANK).to(tl.pointer_type(tl.int32)) + tl.arange(0, WORLD)
    parts = _peers(buffers, tl.bfloat16, WORLD)
    first = pid + (RANK + WORLD - pid % WORLD) % WORLD * programs
    wait_for_previous()
    # The row that this program sums for all ranks, if it has one.
    own = _row(x, first, rows, width, column)
    stream = own
    if RESIDUAL:
        stream = _row(residual, first, rows, width, column)
    launch = tl.load(state) + 1
    half = (launch & 1) * capacity
    sums = half + 2 * capacity
    if PHASE == ALL or PHASE == PUBLISH:  # noqa: SIM109
        following = _row(x, pid, rows, width, column)
        for row in tl.range(pid, rows, programs):
            current = following
            following = _row(x, row + programs, rows, width, column)
            tl.store(parts[RANK] + (half + row * width + column), current, mask=inside)
        _raise_flags(peers, pid, launch, RANK, WORLD)
    if PHASE == ALL or PHASE == EXCHANGE:  # noqa: SIM109
        _await_flags(flags + pid * WORLD, launch)
        for row in tl.range(first, rows, programs * WORLD):
            at = row * width + column
            tile = _sum_of_ranks(parts, half + at, inside, own, RANK, WORLD)
            if RESIDUAL:
                tile += stream.to(tl.float32)
                stream = _row(residual, row + programs * WORLD, rows, width, column)
            own = _row(x, row + programs * WORLD, rows, width, column)
            rounded = to_bf16(tile)
            for rank in tl.static_range(WORLD):
                tl.store(parts[rank] + (sums + at), rounded, mask=inside)
        _raise_flags(peers, programs + pid, launch, RANK, WORLD)
    if PHASE == ALL or PHASE == FINISH:  # noqa: SIM109
        _await_flags(flags + (programs + pid) * WORLD, launch)
        there = inside & (pid < rows)
        source = parts[RANK]
        at = sums + pid * width + column
        following = tl.load(source + at, mask=there, other=0.0, volatile=True)
        for row in tl.range(pid, rows, programs):
            at = row * width + column
            value = following
            there = inside & (row + programs < rows)
            after = sums + at + programs * width
            following = tl.load(source + after, mask=there, other=0.0, volatile=True)
            tl.store(total + at, value, mask=inside)
            _finish_row(
                value.to(tl.float32), row, rows, at, inside, gain, normed, values, scales, width,
                eps, GROUPS, QUANTISE,
            )  # fmt: skip
        _leave(state, launch)
