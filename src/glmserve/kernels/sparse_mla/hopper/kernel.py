# SPDX-License-Identifier: Apache-2.0
"""`attend_fp8` of the plain form, written in Gluon for eight heads on Hopper.

The arithmetic is that of the plain kernel. What Gluon adds: gathers of the next tile run under the
arithmetic of this one, the products of a tile are in flight together, weights sums stay in lanes,
and e4m3 becomes f16 by byte permutes that leave each value where the A fragment of wgmma wants it.
The interpreter cannot run Gluon: the plain form is its reference and its fallback.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

SHARED_FROM, PER = 528, 2
_NEVER = gl.constexpr(-1.0e30)
_FACTOR = gl.constexpr(64.0)


@gluon.jit
def _gather(
    values, ropes, scales, k_buffers, r_buffers, s_buffers, slot, slot_lane, stage,
    BYTES: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """Starts the copies of one tile's rows. slot is laid out for rows of e4m3 values, slot_lane one
    a thread; both are at least 0."""
    place = slot.to(gl.int64)
    c = gl.arange(0, 128, layout=gl.SliceLayout(0, BYTES))
    row = values + (place * 656)[:, None] + c[None, :]
    for g in gl.static_range(4):
        async_copy.async_copy_global_to_shared(k_buffers.index(stage * 4 + g), row + g * 128)
    r = gl.arange(0, 64, layout=gl.SliceLayout(0, HALVES))
    place = gl.convert_layout(slot, gl.SliceLayout(1, HALVES)).to(gl.int64)
    key = ropes + (place * 328 + 264)[:, None] + r[None, :]
    async_copy.async_copy_global_to_shared(r_buffers.index(stage), key)
    scale = scales + slot_lane.to(gl.int64) * 164 + 128
    for g in gl.static_range(4):
        async_copy.async_copy_global_to_shared(s_buffers.index(stage * 4 + g), scale + g)


@gluon.jit
def _slots(mine, place, stop):
    """Slots of a tile; what is unused or beyond the leaf reads slot 0 and counts for nothing."""
    return gl.maximum(gl.load(mine + place, mask=place < stop, other=-1), 0)


@gluon.jit
def _query_part(q, low, to_range):
    """The high e4m3 part of q, or what is left of it times 16 where `low`."""
    scaled = q * to_range
    high = scaled.to(gl.float8e4nv).to(gl.float32)
    return gl.where(low, (scaled - high) * 16.0, scaled).to(gl.float8e4nv)


@gluon.jit
def _values(buffer, PACKS: gl.constexpr, FRAGMENT: gl.constexpr):
    """One group's e4m3 [64 tokens, 128] as the f16 A operand [128, 64], lines in stored order."""
    # A pack is two tokens of four dimensions. The permutes interleave the tokens, so that each
    # conversion of two bytes gives the f16 pair of one dimension.
    v = gl.inline_asm_elementwise(
        """{
        .reg .b32 front, back;
        .reg .b16 one, two;
        prmt.b32 front, $4, $5, 0x5140;
        prmt.b32 back, $4, $5, 0x7362;
        mov.b32 {one, two}, front;
        cvt.rn.f16x2.e4m3x2 $0, one;
        cvt.rn.f16x2.e4m3x2 $1, two;
        mov.b32 {one, two}, back;
        cvt.rn.f16x2.e4m3x2 $2, one;
        cvt.rn.f16x2.e4m3x2 $3, two;
        }""",
        "=r,=r,=r,=r,r,r",
        [buffer.load(PACKS)],
        dtype=gl.float16,
        is_pure=True,
        pack=8,
    )
    # Index bits (t0, d1, d0) of the pack now say (d1, d0, t0).
    v = v.reshape([32, 2, 4, 8, 2, 2]).permute([1, 2, 4, 3, 0, 5]).reshape([128, 64])
    return gl.convert_layout(v, FRAGMENT)


@gluon.jit
def _store(acc, target, ROWS: gl.constexpr):
    """acc [128 in stored order, every head twice] as [head, 128] in natural order."""
    x, _ = gl.split(acc.reshape([128, 8, 2]))
    x = x.reshape([2, 4, 2, 8, 8]).permute([4, 1, 3, 0, 2]).reshape([8, 128])
    gl.store(target, gl.convert_layout(x, ROWS).to(gl.bfloat16))


@gluon.jit
def _finish(
    a0, a1, a2, a3, m, sums, fit, out, lse, unit,
    PARTIAL: gl.constexpr, ROWS: gl.constexpr, MMA16: gl.constexpr,
):  # fmt: skip
    """Stores a leaf's output, or its partial output and the logarithm of its sum."""
    total = gl.sum(sums, 0)
    weight = gl.where(total > 0, 1.0 / (fit * gl.maximum(total, 1e-30)), 0.0)[None, :]
    h = gl.arange(0, 8, layout=gl.SliceLayout(1, ROWS))
    o = gl.arange(0, 128, layout=gl.SliceLayout(0, ROWS))
    target = out + unit * 4096 + h[:, None] * 512 + o[None, :]
    if PARTIAL:
        column = gl.arange(0, 16, layout=gl.SliceLayout(0, MMA16))
        size = gl.where(total > 0, m + gl.log2(gl.maximum(total, 1e-30)), _NEVER)
        gl.store(lse + unit * 8 + column // 2, size, mask=column % 2 == 0)
    _store(a0 * weight, target, ROWS)
    _store(a1 * weight, target + 128, ROWS)
    _store(a2 * weight, target + 256, ROWS)
    _store(a3 * weight, target + 384, ROWS)


@gluon.jit(do_not_specialize=["k", "leaves", "mine_leaves"])
def attend(
    query, cache, slots, out, lse, scale, fit, k, leaves, mine_leaves,
    LEAF: gl.constexpr, STAGES: gl.constexpr, BOUNDED: gl.constexpr, PARTIAL: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """`mine_leaves` successive leaves of one row. `scale` includes log2(e)."""
    BYTES: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    HALVES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    FOURS: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0])
    QUERY: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    ROWS: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    MMA8: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 32])
    MMA16: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16])
    FRAGMENT: gl.constexpr = gl.DotOperandLayout(0, MMA16, 2)
    PACKS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [1, 0], [8, 0], [16, 0], [32, 0]],
        [[2, 0], [4, 0], [0, 4], [0, 8], [0, 16]],
        [[0, 32], [0, 64]],
        [],
        [64, 128],
    )
    SHARED8: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    SHARED16: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    SHARED_P: gl.constexpr = gl.NVMMASharedLayout(32, 16, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    shares = (leaves + mine_leaves - 1) // mine_leaves
    row = gl.program_id(0) // shares
    leaf = (gl.program_id(0) % shares) * mine_leaves
    values = cache.to(gl.pointer_type(gl.float8e4nv))
    scales = cache.to(gl.pointer_type(gl.float32))
    ropes = cache.to(gl.pointer_type(gl.bfloat16))
    k_buffers = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * 4, 64, 128], SHARED8)
    r_buffers = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], SHARED16)
    s_buffers = gl.allocate_shared_memory(gl.float32, [STAGES * 4, 64], FLAT)
    q_buffers = gl.allocate_shared_memory(gl.float8e4nv, [4, 16, 128], SHARED8)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [16, 64], SHARED16)
    p_buffers = gl.allocate_shared_memory(gl.float16, [4, 64, 16], SHARED_P)

    begin = leaf * LEAF
    stop = gl.minimum(begin + mine_leaves * LEAF, k)
    mine = slots + row * k
    t = gl.arange(0, 64, layout=gl.SliceLayout(1, BYTES))
    lane = gl.arange(0, 64, layout=LANES)
    for s in gl.static_range(STAGES - 1):
        at = _slots(mine, begin + s * 64 + t, stop)
        at_lane = _slots(mine, begin + s * 64 + lane, stop)
        _gather(
            values, ropes, scales, k_buffers, r_buffers, s_buffers, at, at_lane, s, BYTES, HALVES
        )
        async_copy.commit_group()
    at = _slots(mine, begin + (STAGES - 1) * 64 + t, stop)
    at_lane = _slots(mine, begin + (STAGES - 1) * 64 + lane, stop)
    # How many tokens there are: unused places are at the end of a selection.
    span = gl.arange(0, LEAF, layout=gl.SliceLayout(1, FOURS))
    used = gl.zeros([LEAF], gl.int32, gl.SliceLayout(1, FOURS))
    for j in range(mine_leaves):
        here = begin + j * LEAF + span
        used += (gl.load(mine + here, mask=here < stop, other=-1) >= 0).to(gl.int32)
    count = gl.sum(used, 0)
    tiles = (count + 63) // 64

    c = gl.arange(0, 16, layout=gl.SliceLayout(1, QUERY))
    d = gl.arange(0, 128, layout=gl.SliceLayout(0, QUERY))
    low = (c % 2 == 1)[:, None]
    line = query + row * 4608 + (c // 2)[:, None] * 576 + d[None, :]
    q0 = gl.load(line).to(gl.float32)
    q1 = gl.load(line + 128).to(gl.float32)
    q2 = gl.load(line + 256).to(gl.float32)
    q3 = gl.load(line + 384).to(gl.float32)
    top = gl.maximum(gl.maximum(gl.abs(q0), gl.abs(q1)), gl.maximum(gl.abs(q2), gl.abs(q3)))
    top = gl.maximum(gl.max(top, 1), 1e-20)
    to_range = (448.0 / top)[:, None]
    q_buffers.index(0).store(_query_part(q0, low, to_range))
    q_buffers.index(1).store(_query_part(q1, low, to_range))
    q_buffers.index(2).store(_query_part(q2, low, to_range))
    q_buffers.index(3).store(_query_part(q3, low, to_range))
    rc = gl.arange(0, 16, layout=gl.SliceLayout(1, HALVES))
    rd = gl.arange(0, 64, layout=gl.SliceLayout(0, HALVES))
    rope_line = query + row * 4608 + (rc // 2)[:, None] * 576 + 512 + rd[None, :]
    turned = gl.load(rope_line).to(gl.float32)
    q_rope.store(gl.where((rc % 2 == 1)[:, None], 0.0, turned).to(gl.bfloat16))
    column_scale = scale * top * (1.0 / 448.0) * gl.where(c % 2 == 1, 0.0625, 1.0)
    column_scale = gl.convert_layout(column_scale, gl.SliceLayout(0, MMA8))

    # Weights times scales go through f16; `fit` keeps them in its range. Without a bound on the
    # latents it comes from the largest scale of the leaf (then this program's only one).
    if not BOUNDED:
        four = gl.arange(0, 4, layout=gl.SliceLayout(0, FOURS))
        first = gl.load(mine + begin + span, mask=begin + span < stop, other=-1)
        group_place = gl.maximum(first, 0).to(gl.int64)[:, None] * 164 + 128 + four[None, :]
        found = gl.where((first >= 0)[:, None], gl.load(scales + group_place), 0.0)
        largest = gl.max(gl.max(found, 1), 0)
        bits = (largest.to(gl.int32, bitcast=True) & 0x7F800000) + 0x800000
        fit = _FACTOR / gl.where(largest > 0, bits.to(gl.float32, bitcast=True), 1.0)

    m = gl.full([16], _NEVER, gl.float32, gl.SliceLayout(0, MMA16))
    sums = gl.zeros([64, 16], gl.float32, MMA16)
    a0 = gl.zeros([128, 16], gl.float32, MMA16)
    a1 = gl.zeros([128, 16], gl.float32, MMA16)
    a2 = gl.zeros([128, 16], gl.float32, MMA16)
    a3 = gl.zeros([128, 16], gl.float32, MMA16)
    none8 = gl.zeros([64, 16], gl.float32, MMA8)
    none16 = gl.zeros([64, 16], gl.float32, MMA16)
    token = gl.arange(0, 64, layout=gl.SliceLayout(1, MMA16))
    for i in range(tiles):
        stage = i % STAGES
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()
        kb = stage * 4
        s0 = warpgroup_mma(
            k_buffers.index(kb), q_buffers.index(0).permute((1, 0)), none8, use_acc=False,
            is_async=True,
        )  # fmt: skip
        s1 = warpgroup_mma(
            k_buffers.index(kb + 1), q_buffers.index(1).permute((1, 0)), none8, use_acc=False,
            is_async=True,
        )  # fmt: skip
        s2 = warpgroup_mma(
            k_buffers.index(kb + 2), q_buffers.index(2).permute((1, 0)), none8, use_acc=False,
            is_async=True,
        )  # fmt: skip
        s3 = warpgroup_mma(
            k_buffers.index(kb + 3), q_buffers.index(3).permute((1, 0)), none8, use_acc=False,
            is_async=True,
        )  # fmt: skip
        sr = warpgroup_mma(
            r_buffers.index(stage), q_rope.permute((1, 0)), none16, use_acc=False, is_async=True
        )
        if i + STAGES - 1 < tiles:
            _gather(
                values, ropes, scales, k_buffers, r_buffers, s_buffers, at, at_lane,
                (i + STAGES - 1) % STAGES, BYTES, HALVES,
            )  # fmt: skip
        async_copy.commit_group()
        ahead = begin + (i + STAGES) * 64
        at = _slots(mine, ahead + t, stop)
        at_lane = _slots(mine, ahead + lane, stop)
        g0 = s_buffers.index(kb).load(gl.SliceLayout(1, MMA8))
        g1 = s_buffers.index(kb + 1).load(gl.SliceLayout(1, MMA8))
        g2 = s_buffers.index(kb + 2).load(gl.SliceLayout(1, MMA8))
        g3 = s_buffers.index(kb + 3).load(gl.SliceLayout(1, MMA8))
        v0 = _values(k_buffers.index(kb), PACKS, FRAGMENT)
        s0, s1, s2, s3, sr = warpgroup_mma_wait(0, deps=[s0, s1, s2, s3, sr])
        p = s0 * g0[:, None] + s1 * g1[:, None] + s2 * g2[:, None] + s3 * g3[:, None]
        p = gl.convert_layout(p * column_scale[None, :], MMA16) + sr * scale
        x, y = gl.split(p.reshape([64, 8, 2]))
        x = x + y
        p = gl.convert_layout(gl.join(x, x).reshape([64, 16]), MMA16)
        seen = (i * 64 + token < count)[:, None]
        p = gl.where(seen, p, _NEVER)
        m_new = gl.maximum(m, gl.max(p, 0))
        fade = gl.exp2(m - m_new)
        m = m_new
        p = gl.exp2(p - m_new[None, :])
        sums = sums * fade[None, :] + p
        p = p * fit
        h0 = gl.convert_layout(g0, gl.SliceLayout(1, MMA16))
        h1 = gl.convert_layout(g1, gl.SliceLayout(1, MMA16))
        h2 = gl.convert_layout(g2, gl.SliceLayout(1, MMA16))
        h3 = gl.convert_layout(g3, gl.SliceLayout(1, MMA16))
        p_buffers.index(0).store((p * h0[:, None]).to(gl.float16))
        p_buffers.index(1).store((p * h1[:, None]).to(gl.float16))
        p_buffers.index(2).store((p * h2[:, None]).to(gl.float16))
        p_buffers.index(3).store((p * h3[:, None]).to(gl.float16))
        fence_async_shared()
        a0 = warpgroup_mma(v0, p_buffers.index(0), a0 * fade[None, :], is_async=True)
        v1 = _values(k_buffers.index(kb + 1), PACKS, FRAGMENT)
        a1 = warpgroup_mma(v1, p_buffers.index(1), a1 * fade[None, :], is_async=True)
        a0, v0 = warpgroup_mma_wait(1, deps=[a0, v0])
        v2 = _values(k_buffers.index(kb + 2), PACKS, FRAGMENT)
        a2 = warpgroup_mma(v2, p_buffers.index(2), a2 * fade[None, :], is_async=True)
        a1, v1 = warpgroup_mma_wait(1, deps=[a1, v1])
        v3 = _values(k_buffers.index(kb + 3), PACKS, FRAGMENT)
        a3 = warpgroup_mma(v3, p_buffers.index(3), a3 * fade[None, :], is_async=True)
        a2, a3 = warpgroup_mma_wait(0, deps=[a2, a3])
        # The end of a leaf: the next tile's rows are on their way already.
        if ((i + 1) % (LEAF // 64) == 0) | (i + 1 == tiles):
            unit = row * leaves + leaf + i // (LEAF // 64)
            _finish(a0, a1, a2, a3, m, sums, fit, out, lse, unit, PARTIAL, ROWS, MMA16)
            m = gl.full([16], _NEVER, gl.float32, gl.SliceLayout(0, MMA16))
            sums = gl.zeros([64, 16], gl.float32, MMA16)
            a0 = gl.zeros([128, 16], gl.float32, MMA16)
            a1 = gl.zeros([128, 16], gl.float32, MMA16)
            a2 = gl.zeros([128, 16], gl.float32, MMA16)
            a3 = gl.zeros([128, 16], gl.float32, MMA16)
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip
    # Leaves without a token.
    for j in range((tiles * 64 + LEAF - 1) // LEAF, gl.minimum(mine_leaves, leaves - leaf)):
        _finish(
            a0, a1, a2, a3, m, sums, fit, out, lse, row * leaves + leaf + j, PARTIAL, ROWS, MMA16
        )


def launch(
    query: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    fit: float,
    leaf: int,
    leaves: int,
    pdl: bool,
) -> None:
    """Fills out [rows, leaves, 8, 512] and lse [rows, leaves, 8]; for one leaf only out."""
    rows, k = slots.shape
    # Leaves of one program: where there are many, the query is prepared once for two of them.
    several = fit > 0 and rows * leaves > SHARED_FROM
    mine = PER if several else 1
    attend[(rows * triton.cdiv(leaves, mine),)](
        query, cache, slots, out, lse, scale, fit, k, leaves, mine,
        LEAF=triton.next_power_of_2(leaf), STAGES=2, BOUNDED=fit > 0, PARTIAL=leaves > 1,
        PDL=pdl, num_warps=4,
    )  # fmt: skip
