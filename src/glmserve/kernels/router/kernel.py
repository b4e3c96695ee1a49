# SPDX-License-Identifier: Apache-2.0
"""Router scores as split-K partial sums; the choice of experts of one row a warp; and, where there
is one row only, the sorted pairs of the experts held here.
"""

import triton
import triton.language as tl

from ..linear.kernel import chunk_product
from ..triton_common import dot, let_next_start, prefetch, to_bf16, wait_for_previous

LOWEST = tl.constexpr(-(1 << 31))


@triton.jit(do_not_specialize=["rows"])
def score_parts(
    x,
    gate,
    parts,
    rows,
    experts,
    K: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    CHUNKS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """parts [CHUNKS, rows, experts] fp32: chunk c of x [rows, K] gate [experts, K]^T.

    bf16 rows times a bf16 gate have exact products, so the matrix unit's fp32 sum is an fp32
    product. WIDE: the gate is fp32; each of its numbers is the sum of three bf16, so three exact
    products add up to its own.
    """
    BLOCKS: tl.constexpr = K // BK
    PER: tl.constexpr = (BLOCKS + CHUNKS - 1) // CHUNKS
    let_next_start()
    chunk = tl.program_id(0) % CHUNKS
    n = tl.program_id(0) // CHUNKS * BN + tl.arange(0, BN)
    LINE: tl.constexpr = 1024 // gate.dtype.element_ty.primitive_bitwidth
    lines = chunk * PER * BK + tl.arange(0, 16) * LINE
    prefetch(
        gate + tl.minimum(n, experts - 1)[:, None] * K + lines[None, :],
        (lines < tl.minimum((chunk + 1) * PER * BK, K))[None, :] & (n < experts)[:, None],
    )
    wait_for_previous()
    row = tl.program_id(1) * BM + tl.arange(0, BM)
    real = row < rows
    k = tl.arange(0, BK)
    x_tile = x + tl.minimum(row, rows - 1)[:, None].to(tl.int64) * K + k[None, :]
    g_tile = gate + tl.minimum(n, experts - 1)[:, None] * K + k[None, :]
    begin = chunk * PER
    end = tl.minimum(begin + PER, BLOCKS)
    if WIDE:
        acc = tl.zeros([BN, BM], tl.float32)
        for block in tl.range(begin, end):
            rows_tile = tl.load(x_tile + block * BK, mask=real[:, None], other=0.0)
            wide = tl.load(g_tile + block * BK)
            high = to_bf16(wide)
            rest = wide - high.to(tl.float32)
            middle = to_bf16(rest)
            low = to_bf16(rest - middle.to(tl.float32))
            acc = dot(high, rows_tile.T, acc)
            acc = dot(middle, rows_tile.T, acc)
            acc = dot(low, rows_tile.T, acc)
    else:
        acc = chunk_product(
            x_tile, x, 0, g_tile, gate, begin, end, real, BN, BM, BK, False, 3
        )  # fmt: skip
    target = parts + (chunk * rows + row[None, :]).to(tl.int64) * experts + n[:, None]
    tl.store(target, acc, mask=real[None, :] & (n[:, None] < experts))


@triton.jit(do_not_specialize=["rows", "padding", "first", "max_tiles"])
def choose_experts(
    parts,
    bias,
    ids,
    weights,
    totals,
    row_seq,
    padding,
    rows,
    experts,
    scale,
    order,
    place,
    offsets,
    tile_expert,
    tile_begin,
    tile_end,
    tile_count,
    first,
    local,
    max_tiles,
    TOP_K: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
    SORT: tl.constexpr,
):
    """ids [rows, TOP_K] int64 ascending, weights [rows, TOP_K] fp32, of the summed parts.

    COUNT: totals [experts] int64 grow by the choices of rows whose row_seq is not `padding`.
    SORT, for one row: order .. tile_count become the pairs of experts [first, first + local), as
    `sorting.sort_pairs` makes them: each of the row's choices has an expert of its own.
    """
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    inside = expert < experts
    nudge = tl.load(bias + expert, mask=inside, other=0.0)
    wait_for_previous()
    let_next_start()  # not before: the experts' weights would be in the way of the gate's
    line = parts + row * experts + expert
    score = tl.load(line, mask=inside, other=0.0)
    for part in tl.static_range(1, PARTS):
        score += tl.load(line + part * (rows.to(tl.int64) * experts), mask=inside, other=0.0)
    p = tl.sigmoid(score)
    rank = tl.where(inside, p + nudge, float("-inf"))
    # As integers of the same order, whose maximum a warp finds in one instruction.
    bits = rank.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    rest = key
    for _ in tl.static_range(TOP_K):
        least = tl.max(rest, 0)
        rest = tl.where(rest == least, LOWEST, rest)
    if tl.sum((key >= least).to(tl.int32), 0) > TOP_K:  # some are equal: fewer values will do
        rest = key
        count = 0
        for _turn in tl.range(TOP_K):
            value = tl.max(rest, 0)
            if count < TOP_K:
                least = value
            count += tl.sum((rest == value).to(tl.int32), 0)
            rest = tl.where(rest == value, LOWEST, rest)
    above = (key > least).to(tl.int32)
    equal = (key == least).to(tl.int32)
    need = TOP_K - tl.sum(above, 0)
    both = above + (equal << 16)
    before = tl.cumsum(both, 0) - both
    ties = before >> 16
    taken = (above > 0) | ((equal > 0) & (ties < need))  # of equal ones the lowest ids
    # From 2^-31 on, a p below 1 is a whole number of 2^-55: their sum is exact in any order.
    exact = (tl.where(taken, p, 0.0) * 36028797018963968.0).to(tl.int64)
    total = tl.sum(exact, 0).to(tl.float32) * 2.7755575615628914e-17 + 1e-20
    number = (before & 0xFFFF) + tl.minimum(ties, need)
    slot = row * TOP_K + number
    tl.store(ids + slot, expert.to(tl.int64), mask=taken)
    tl.store(weights + slot, p / total * scale, mask=taken)
    if COUNT:
        real = tl.load(row_seq + row) != padding
        one = taken.to(tl.int64)
        tl.atomic_add(totals + expert, one, mask=taken & real, sem="relaxed")
    if SORT:
        mine = expert - first
        held = taken & (mine >= 0) & (mine < local)
        at = number - tl.sum((taken & (mine < 0)).to(tl.int32), 0)
        count = tl.sum(held.to(tl.int32), 0)
        tl.store(order + at, number, mask=held)
        tl.store(place + number, tl.where(held, at, -1), mask=taken)
        tl.store(offsets + mine, at, mask=(mine >= 0) & (mine < local))
        tl.store(offsets + local, count)
        tl.store(tile_expert + at, mine, mask=held)
        tl.store(tile_begin + at, at, mask=held)
        tl.store(tile_end + at, at + 1, mask=held)
        tl.store(tile_count, count)
        tl.store(tile_expert + expert, -1, mask=(expert >= count) & (expert < max_tiles))
