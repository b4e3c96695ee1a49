# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA in the Triton language: fp8 rows of 656 B and bf16 rows of 1152 B.

Tokens lie on the M side of every product, so that the rank's few heads fill the 16 columns of the
smallest useful wgmma. A row's selection is cut into leaves of LEAF tokens; each leaf is one
online softmax, and `merge` joins a row's leaves in one fixed tree. Leaves depend on the selection's
length alone, so a row gives the same bits in any batch.

fp8 rows are never dequantised. The query is split into a high and a low e4m3 part (two columns a
head), the products run on the stored values, and the row's scales multiply scores and softmax
weights instead (S = sum_g s_g (q_g . k_g), O_g = sum_t (p_t s_tg) v_tg).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_common import dot, let_next_start, to_bf16, to_e4m3, wait_for_previous

_NEVER = tl.constexpr(-1.0e30)  # stands for -inf without making NaN in differences
_FACTOR = tl.constexpr(64.0)  # lifts softmax weights away from f16's subnormals


@triton.jit
def _query_parts(q, low, to_range):
    """The high e4m3 part of q, or what is left of it times 16 where `low`."""
    scaled = q * to_range
    high = to_e4m3(scaled).to(tl.float32)
    return to_e4m3(tl.where(low, (scaled - high) * 16.0, scaled))


@triton.jit
def _values(k, TILE: tl.constexpr):
    """e4m3 [TILE, 128] -> f16 [128, TILE] with the 128 dimensions in the order of `_stored_order`:
    the A fragment of wgmma then takes four adjacent bytes of a token at a time."""
    parts = tl.permute(tl.reshape(k, [TILE, 4, 8, 2, 2]), [3, 1, 4, 2, 0])
    return tl.reshape(parts, [128, TILE]).to(tl.float16)


@triton.jit
def _stored_order(m):
    """The dimension that stands in line m of `_values`."""
    return ((m >> 4) & 3) * 32 + (m & 7) * 4 + (m >> 6) * 2 + ((m >> 3) & 1)


@triton.jit
def _twice(x, TILE: tl.constexpr, HEADS: tl.constexpr):
    """[TILE, HEADS] -> [TILE, 2 HEADS], every column twice."""
    return tl.reshape(tl.broadcast_to(x[:, :, None], [TILE, HEADS, 2]), [TILE, 2 * HEADS])


@triton.jit
def _place(slot, WIDE: tl.constexpr):
    """Slots as multipliers of row offsets: 64 bits only where the cache needs them."""
    place = tl.maximum(slot, 0)
    return place.to(tl.int64) if WIDE else place.to(tl.int32)


@triton.jit
def _above_all_scales(scales, slot, WIDE: tl.constexpr):
    """Power of two just above the leaf's largest scale (1 for an empty leaf)."""
    group = tl.arange(0, 4)
    at = _place(slot, WIDE) * 164 + 128
    found = tl.load(scales + at[:, None] + group[None, :])
    top = tl.max(tl.max(tl.where((slot >= 0)[:, None], found, 0.0), 1), 0)
    bits = (top.to(tl.int32, bitcast=True) & 0x7F800000) + 0x800000
    return tl.where(top > 0, bits.to(tl.float32, bitcast=True), 1.0)


@triton.jit
def _write(target, acc, weight, dims, columns, HEADS: tl.constexpr, TWICE: tl.constexpr):
    """Stores acc [128, columns] * weight with head fastest: place = dim * HEADS + head."""
    head = columns // 2 if TWICE else columns
    once = (columns % 2 == 0) if TWICE else (columns >= 0)
    place = dims[:, None] * HEADS + head[None, :]
    tl.store(target + place, to_bf16(acc * weight[None, :]), mask=once[None, :])


@triton.jit
def _write_output(target, acc, weight, dims, columns, HEADS: tl.constexpr, TWICE: tl.constexpr):
    """Stores acc [128, columns] * weight as [head, 512]."""
    head = columns // 2 if TWICE else columns
    once = (columns % 2 == 0) if TWICE else (columns >= 0)
    place = dims[:, None] + head[None, :] * 512
    tl.store(target + place, to_bf16(acc * weight[None, :]), mask=once[None, :])


@triton.jit(do_not_specialize=["k", "leaves", "all_heads"])
def attend_fp8(
    query, cache, slots, out, lse, scale, k, leaves, all_heads,
    HEADS: tl.constexpr, LEAF: tl.constexpr, TILE: tl.constexpr,
    STAGES: tl.constexpr, WIDE: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """One leaf of one row for HEADS of the heads. `scale` includes log2(e)."""
    TWICE: tl.constexpr = HEADS == 8
    P_COLUMNS: tl.constexpr = 2 * HEADS if TWICE else HEADS
    row = tl.program_id(0) // leaves
    leaf = tl.program_id(0) % leaves
    first_head = tl.program_id(1) * HEADS
    t = tl.arange(0, TILE)
    d = tl.arange(0, 128)
    r = tl.arange(0, 64)
    c = tl.arange(0, 2 * HEADS)
    pc = tl.arange(0, P_COLUMNS)
    values = cache.to(tl.pointer_type(tl.float8e4nv))
    scales = cache.to(tl.pointer_type(tl.float32))
    ropes = cache.to(tl.pointer_type(tl.bfloat16))
    begin = leaf * LEAF
    stop = tl.minimum(begin + LEAF, k)
    let_next_start()
    wait_for_previous()
    mine = slots + row * k
    slot = tl.load(mine + begin + t, mask=begin + t < stop, other=-1)
    # Unused places are at the end of a selection: a leaf that begins with one has no token.
    used_tiles = tl.where(tl.max(slot, 0) >= 0, tl.cdiv(stop - begin, TILE), 0)

    low = (c % 2 == 1)[:, None]
    line = query + (row * all_heads + first_head + c // 2)[:, None] * 576
    q0 = tl.load(line + d[None, :]).to(tl.float32)
    q1 = tl.load(line + 128 + d[None, :]).to(tl.float32)
    q2 = tl.load(line + 256 + d[None, :]).to(tl.float32)
    q3 = tl.load(line + 384 + d[None, :]).to(tl.float32)
    q_rope = tl.where(low, 0.0, tl.load(line + 512 + r[None, :]).to(tl.float32)).to(tl.bfloat16)
    top = tl.maximum(
        tl.maximum(tl.max(tl.abs(q0), 1), tl.max(tl.abs(q1), 1)),
        tl.maximum(tl.max(tl.abs(q2), 1), tl.max(tl.abs(q3), 1)),
    )
    top = tl.maximum(top, 1e-20)
    to_range = (448.0 / top)[:, None]
    q0 = _query_parts(q0, low, to_range)
    q1 = _query_parts(q1, low, to_range)
    q2 = _query_parts(q2, low, to_range)
    q3 = _query_parts(q3, low, to_range)
    column_scale = scale * top * (1.0 / 448.0) * tl.where(c % 2 == 1, 0.0625, 1.0)

    # Weights times scales go through f16; `fit` keeps them in its range.
    span = tl.arange(0, LEAF)
    place = tl.load(mine + begin + span, mask=begin + span < stop, other=-1)
    fit = _FACTOR / _above_all_scales(scales, place, WIDE)

    m = tl.full([P_COLUMNS], _NEVER, tl.float32)
    total = tl.zeros([P_COLUMNS], tl.float32)
    a0 = tl.zeros([128, P_COLUMNS], tl.float32)
    a1 = tl.zeros([128, P_COLUMNS], tl.float32)
    a2 = tl.zeros([128, P_COLUMNS], tl.float32)
    a3 = tl.zeros([128, P_COLUMNS], tl.float32)
    none = tl.zeros([TILE, 2 * HEADS], tl.float32)
    at = _place(slot, WIDE) * 164 + 128
    s0 = tl.load(scales + at)
    s1 = tl.load(scales + at + 1)
    s2 = tl.load(scales + at + 2)
    s3 = tl.load(scales + at + 3)
    for i in tl.range(0, used_tiles, num_stages=STAGES):
        byte = _place(slot, WIDE)[:, None] * 656
        k0 = tl.load(values + byte + d[None, :])
        k1 = tl.load(values + byte + 128 + d[None, :])
        k2 = tl.load(values + byte + 256 + d[None, :])
        k3 = tl.load(values + byte + 384 + d[None, :])
        k_rope = tl.load(ropes + _place(slot, WIDE)[:, None] * 328 + 264 + r[None, :])
        seen = slot >= 0
        following = begin + tl.minimum(i + 1, used_tiles - 1) * TILE + t
        slot = tl.load(mine + following, mask=following < stop, other=-1)
        at = _place(slot, WIDE) * 164 + 128
        n0 = tl.load(scales + at)
        n1 = tl.load(scales + at + 1)
        n2 = tl.load(scales + at + 2)
        n3 = tl.load(scales + at + 3)
        p = dot(k0, q0.T, none) * s0[:, None] + dot(k1, q1.T, none) * s1[:, None]
        p += dot(k2, q2.T, none) * s2[:, None] + dot(k3, q3.T, none) * s3[:, None]
        p = p * column_scale[None, :] + dot(k_rope, q_rope.T, none) * scale
        p = tl.sum(tl.reshape(p, [TILE, HEADS, 2]), 2)
        if TWICE:
            p = _twice(p, TILE, HEADS)
        p = tl.where(seen[:, None], p, _NEVER)
        m_new = tl.maximum(m, tl.max(p, 0))
        fade = tl.exp2(m - m_new)
        p = tl.where(seen[:, None], tl.exp2(p - m_new[None, :]), 0.0)
        total = total * fade + tl.sum(p, 0)
        m = m_new
        weights = p * fit
        a0 = tl.dot(_values(k0, TILE), (weights * s0[:, None]).to(tl.float16), a0 * fade[None, :])
        a1 = tl.dot(_values(k1, TILE), (weights * s1[:, None]).to(tl.float16), a1 * fade[None, :])
        a2 = tl.dot(_values(k2, TILE), (weights * s2[:, None]).to(tl.float16), a2 * fade[None, :])
        a3 = tl.dot(_values(k3, TILE), (weights * s3[:, None]).to(tl.float16), a3 * fade[None, :])
        s0 = n0
        s1 = n1
        s2 = n2
        s3 = n3
    inverse = tl.where(total > 0, 1.0 / (fit * tl.maximum(total, 1e-30)), 0.0)
    if PARTIAL:
        target = out + ((row * leaves + leaf) * all_heads + first_head) * 512
        _write(target, a0, inverse, d, pc, HEADS, TWICE)
        _write(target + 128 * HEADS, a1, inverse, d, pc, HEADS, TWICE)
        _write(target + 256 * HEADS, a2, inverse, d, pc, HEADS, TWICE)
        _write(target + 384 * HEADS, a3, inverse, d, pc, HEADS, TWICE)
        head = first_head + (pc // 2 if TWICE else pc)
        size = tl.where(total > 0, m + tl.log2(tl.maximum(total, 1e-30)), _NEVER)
        tl.store(lse + (row * leaves + leaf) * all_heads + head, size)
    else:
        target = out + (row * all_heads + first_head) * 512
        order = _stored_order(d)
        _write_output(target, a0, inverse, order, pc, HEADS, TWICE)
        _write_output(target + 128, a1, inverse, order, pc, HEADS, TWICE)
        _write_output(target + 256, a2, inverse, order, pc, HEADS, TWICE)
        _write_output(target + 384, a3, inverse, order, pc, HEADS, TWICE)


@triton.jit(do_not_specialize=["k", "leaves", "all_heads"])
def attend_bf16(
    query, cache, slots, out, lse, scale, k, leaves, all_heads,
    HEADS: tl.constexpr, LEAF: tl.constexpr, TILE: tl.constexpr,
    STAGES: tl.constexpr, WIDE: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """As attend_fp8, on rows of 576 bf16 values."""
    TWICE: tl.constexpr = HEADS == 8
    P_COLUMNS: tl.constexpr = 2 * HEADS if TWICE else HEADS
    row = tl.program_id(0) // leaves
    leaf = tl.program_id(0) % leaves
    first_head = tl.program_id(1) * HEADS
    t = tl.arange(0, TILE)
    d = tl.arange(0, 128)
    r = tl.arange(0, 64)
    pc = tl.arange(0, P_COLUMNS)
    begin = leaf * LEAF
    stop = tl.minimum(begin + LEAF, k)
    let_next_start()
    wait_for_previous()
    mine = slots + row * k
    slot = tl.load(mine + begin + t, mask=begin + t < stop, other=-1)
    used_tiles = tl.where(tl.max(slot, 0) >= 0, tl.cdiv(stop - begin, TILE), 0)
    head = first_head + (pc // 2 if TWICE else pc)
    line = query + (row * all_heads + head)[:, None] * 576
    q0 = tl.load(line + d[None, :])
    q1 = tl.load(line + 128 + d[None, :])
    q2 = tl.load(line + 256 + d[None, :])
    q3 = tl.load(line + 384 + d[None, :])
    q_rope = tl.load(line + 512 + r[None, :])
    m = tl.full([P_COLUMNS], _NEVER, tl.float32)
    lanes = tl.zeros([TILE, P_COLUMNS], tl.float32)  # sums of weights, added up at the end
    a0 = tl.zeros([128, P_COLUMNS], tl.float32)
    a1 = tl.zeros([128, P_COLUMNS], tl.float32)
    a2 = tl.zeros([128, P_COLUMNS], tl.float32)
    a3 = tl.zeros([128, P_COLUMNS], tl.float32)
    for i in tl.range(0, used_tiles, num_stages=STAGES):
        at = cache + _place(slot, WIDE)[:, None] * 576
        k0 = tl.load(at + d[None, :])
        k1 = tl.load(at + 128 + d[None, :])
        k2 = tl.load(at + 256 + d[None, :])
        k3 = tl.load(at + 384 + d[None, :])
        k_rope = tl.load(at + 512 + r[None, :])
        seen = slot >= 0
        following = begin + tl.minimum(i + 1, used_tiles - 1) * TILE + t
        slot = tl.load(mine + following, mask=following < stop, other=-1)
        p = tl.zeros([TILE, P_COLUMNS], tl.float32)
        p = dot(k0, q0.T, p)
        p = dot(k1, q1.T, p)
        p = dot(k2, q2.T, p)
        p = dot(k3, q3.T, p)
        p = dot(k_rope, q_rope.T, p)
        p = tl.where(seen[:, None], p * scale, _NEVER)
        m_new = tl.maximum(m, tl.max(p, 0))
        fade = tl.exp2(m - m_new)
        p = tl.where(seen[:, None], tl.exp2(p - m_new[None, :]), 0.0)
        lanes = lanes * fade[None, :] + p
        m = m_new
        weights = to_bf16(p)
        a0 = dot(k0.T, weights, a0 * fade[None, :])
        a1 = dot(k1.T, weights, a1 * fade[None, :])
        a2 = dot(k2.T, weights, a2 * fade[None, :])
        a3 = dot(k3.T, weights, a3 * fade[None, :])
    total = tl.sum(lanes, 0)
    inverse = tl.where(total > 0, 1.0 / tl.maximum(total, 1e-30), 0.0)
    if PARTIAL:
        target = out + ((row * leaves + leaf) * all_heads + first_head) * 512
        _write(target, a0, inverse, d, pc, HEADS, TWICE)
        _write(target + 128 * HEADS, a1, inverse, d, pc, HEADS, TWICE)
        _write(target + 256 * HEADS, a2, inverse, d, pc, HEADS, TWICE)
        _write(target + 384 * HEADS, a3, inverse, d, pc, HEADS, TWICE)
        size = tl.where(total > 0, m + tl.log2(tl.maximum(total, 1e-30)), _NEVER)
        tl.store(lse + (row * leaves + leaf) * all_heads + head, size)
    else:
        target = out + (row * all_heads + first_head) * 512
        _write_output(target, a0, inverse, d, pc, HEADS, TWICE)
        _write_output(target + 128, a1, inverse, d, pc, HEADS, TWICE)
        _write_output(target + 256, a2, inverse, d, pc, HEADS, TWICE)
        _write_output(target + 384, a3, inverse, d, pc, HEADS, TWICE)


@triton.jit(do_not_specialize=["leaves", "all_heads"])
def merge(
    partial, lse, out, leaves, all_heads,
    HEADS: tl.constexpr, LEAVES: tl.constexpr, DIMS: tl.constexpr,
    PERMUTED: tl.constexpr,
):  # fmt: skip
    """Joins a row's leaves for HEADS heads and DIMS of the 512 dimensions."""
    row = tl.program_id(0)
    first_head = tl.program_id(1) * HEADS
    s = tl.arange(0, LEAVES)
    h = tl.arange(0, HEADS)
    m = tl.program_id(2) * DIMS + tl.arange(0, DIMS)
    wait_for_previous()
    let_next_start()
    line = row * leaves + s
    there = (s < leaves)[:, None]
    size = tl.load(
        lse + line[:, None] * all_heads + first_head + h[None, :], mask=there, other=_NEVER
    )
    share = tl.where(size > _NEVER, tl.exp2(size - tl.max(size, 0)[None, :]), 0.0)
    share = share / tl.maximum(tl.sum(share, 0), 1e-30)[None, :]
    at = partial + (line[:, None] * all_heads + first_head) * 512
    place = tl.reshape(m[:, None] * HEADS + h[None, :], [DIMS * HEADS])
    x = tl.load(at + place[None, :], mask=there, other=0.0).to(tl.float32)
    x = tl.reshape(x, [LEAVES, DIMS, HEADS]) * share[:, None, :]
    total = tl.sum(x, 0)
    dims = (m // 128) * 128 + _stored_order(m % 128) if PERMUTED else m
    target = out + (row * all_heads + first_head + h)[None, :] * 512 + dims[:, None]
    tl.store(target, to_bf16(total))
