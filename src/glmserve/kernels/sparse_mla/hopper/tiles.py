# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""Sparse MLA in Gluon for eight heads over fp8 rows on Hopper.

What fixes the bits: every 64 tokens are a tile with a power of two of its own as reference, so its
sums do not depend on its neighbours, and bringing sums to another reference is exact. Tiles are
added in one order: four tiles front to back are a chain, two chains a pair (rounded to bf16), the
pairs of a row a tree. A program sums one tile, a chain or a pair of one row and `joining` goes on
from there: few rows are spread thin, many are added up in registers, and the bits are the same. A
program that sums a whole row adds its pairs front to back, unrounded: prefill only.

Nothing is dequantised. The query is split into a high and a low e4m3 part, softmax weights times
the rows' scales are split the same way, two columns a head; all large products run in fp8. Values
become the A operand by byte permutes in registers.
The interpreter cannot run Gluon: the plain form is its reference and its fallback.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...gluon_common import let_next_start, wait_for_previous
from .parts import (
    BYTES,
    HALVES,
    LIFT,
    MMA8,
    MMA16,
    NEVER,
    ONE,
    QUERY,
    SCALES,
    SCORES,
    SUMS,
    WARPS,
    column,
    gather_rows,
    gather_scales,
    joined,
    power,
    product,
    query_part,
    slots_of,
    store_output,
    store_partial,
    store_weights,
    tile_scales,
    values_operand,
)  # fmt: skip


@gluon.jit(do_not_specialize=["k", "units"])
def attend(
    query, cache, slots, out, sizes, scale, k, units,
    TILES: gl.constexpr, STAGES: gl.constexpr, PARTIAL: gl.constexpr,
):  # fmt: skip
    """TILES successive tiles of one row: 1, 4, 8, or all of a row. `scale` includes log2(e).

    PARTIAL: out [rows, units, 4096] in the order of `store_partial`, sizes [rows, units, 2, 8] the
    reference and the sum of weights; else out [rows, 8, 512].
    """
    CHAINED: gl.constexpr = TILES > 1
    STAGED: gl.constexpr = TILES > 1  # products two at a time: fewer registers, more waits
    PAIRED: gl.constexpr = TILES > 4
    AHEAD: gl.constexpr = STAGES - 1 if STAGES > 1 else 1
    row = gl.program_id(0) // units
    unit = gl.program_id(0) % units
    values = cache.to(gl.pointer_type(gl.float8e4nv))
    scales = cache.to(gl.pointer_type(gl.float32))
    ropes = cache.to(gl.pointer_type(gl.bfloat16))
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    # A buffer each: between accesses to parts of one buffer the compiler would put barriers.
    kb0 = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 64, 128], SWIZZLED)
    kb1 = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 64, 128], SWIZZLED)
    kb2 = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 64, 128], SWIZZLED)
    kb3 = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 64, 128], SWIZZLED)
    r_buffers = gl.allocate_shared_memory(
        gl.bfloat16, [STAGES, 64, 64], gl.NVMMASharedLayout(128, 16, 2)
    )
    s_buffers = gl.allocate_shared_memory(
        gl.float32, [STAGES, 64, 4], gl.SwizzledSharedLayout(4, 1, 1, [1, 0])
    )
    qb0 = gl.allocate_shared_memory(gl.float8e4nv, [16, 128], SWIZZLED)
    qb1 = gl.allocate_shared_memory(gl.float8e4nv, [16, 128], SWIZZLED)
    qb2 = gl.allocate_shared_memory(gl.float8e4nv, [16, 128], SWIZZLED)
    qb3 = gl.allocate_shared_memory(gl.float8e4nv, [16, 128], SWIZZLED)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [16, 64], gl.NVMMASharedLayout(128, 16, 2))
    SWIZZLED_P: gl.constexpr = gl.NVMMASharedLayout(64, 8, 2)
    pb0 = gl.allocate_shared_memory(gl.float8e4nv, [16, 64], SWIZZLED_P)
    pb1 = gl.allocate_shared_memory(gl.float8e4nv, [16, 64], SWIZZLED_P)
    pb2 = gl.allocate_shared_memory(gl.float8e4nv, [16, 64], SWIZZLED_P)
    pb3 = gl.allocate_shared_memory(gl.float8e4nv, [16, 64], SWIZZLED_P)
    m_buffer = gl.allocate_shared_memory(
        gl.float32, [4, 8], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    l_buffer = gl.allocate_shared_memory(
        gl.float32, [4, 8], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )

    wait_for_previous()
    begin = unit * TILES * 64
    stop = gl.minimum(begin + TILES * 64, k)
    mine = slots + row * k
    t = gl.arange(0, 64, layout=gl.SliceLayout(1, BYTES))
    lane = gl.arange(0, 64, layout=gl.SliceLayout(1, SCALES))
    token = gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
    for s in gl.static_range(AHEAD):
        at = slots_of(mine, begin + s * 64 + t, stop)
        at_lane = slots_of(mine, begin + s * 64 + lane, stop)
        gather_rows(
            values, ropes, kb0.index(s), kb1.index(s), kb2.index(s), kb3.index(s),
            r_buffers.index(s), at,
        )  # fmt: skip
        gather_scales(scales, s_buffers.index(s), at_lane)
        async_copy.commit_group()
    if CHAINED:
        at = slots_of(mine, begin + AHEAD * 64 + t, stop)
        at_lane = slots_of(mine, begin + AHEAD * 64 + lane, stop)
    seen = gl.load(mine + begin + token, mask=begin + token < stop, other=-1) >= 0
    # Unused places are at the end of a selection: a tile that begins with one has no token.
    first = begin + gl.arange(0, 32, layout=ONE) * 64
    tiles = gl.sum((gl.load(mine + first, mask=first < stop, other=-1) >= 0).to(gl.int32), 0)

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
    qb0.store(query_part(q0, low, to_range))
    qb1.store(query_part(q1, low, to_range))
    qb2.store(query_part(q2, low, to_range))
    qb3.store(query_part(q3, low, to_range))
    rc = gl.arange(0, 16, layout=gl.SliceLayout(1, HALVES))
    rd = gl.arange(0, 64, layout=gl.SliceLayout(0, HALVES))
    rope_line = query + row * 4608 + (rc // 2)[:, None] * 576 + 512 + rd[None, :]
    turned = gl.load(rope_line).to(gl.float32)
    q_rope.store(gl.where((rc % 2 == 1)[:, None], 0.0, turned).to(gl.bfloat16))
    column_scale = scale * top * (1.0 / 448.0) * gl.where(c % 2 == 1, 0.0625, 1.0)
    column_scale = gl.convert_layout(column_scale, gl.SliceLayout(0, MMA8))

    none = gl.zeros([64, 16], gl.float32, MMA8)
    none16 = gl.zeros([64, 16], gl.float32, MMA16)
    none2 = gl.zeros([128, 16], gl.float32, MMA8)
    m = gl.full([8], NEVER, gl.float32, gl.SliceLayout(0, WARPS))
    total = gl.zeros([8], gl.float32, gl.SliceLayout(0, WARPS))
    a0 = gl.zeros([128, 8], gl.float32, SUMS)
    a1 = gl.zeros([128, 8], gl.float32, SUMS)
    a2 = gl.zeros([128, 8], gl.float32, SUMS)
    a3 = gl.zeros([128, 8], gl.float32, SUMS)
    if PAIRED:
        pair_m = m
        pair_total = total
        b0 = a0
        b1 = a1
        b2 = a2
        b3 = a3
    for i in range(tiles):
        stage = i % STAGES
        async_copy.wait_group(STAGES - 2 if STAGES > 1 else 0)
        fence_async_shared()
        s0 = warpgroup_mma(
            kb0.index(stage), qb0.permute((1, 0)), none, use_acc=False,
            is_async=True,
        )  # fmt: skip
        s1 = warpgroup_mma(
            kb1.index(stage), qb1.permute((1, 0)), none, use_acc=False,
            is_async=True,
        )  # fmt: skip
        s2 = warpgroup_mma(
            kb2.index(stage), qb2.permute((1, 0)), none, use_acc=False,
            is_async=True,
        )  # fmt: skip
        s3 = warpgroup_mma(
            kb3.index(stage), qb3.permute((1, 0)), none, use_acc=False,
            is_async=True,
        )  # fmt: skip
        sr = warpgroup_mma(
            r_buffers.index(stage), q_rope.permute((1, 0)), none16, use_acc=False, is_async=True
        )
        here = seen
        if CHAINED:
            if i + AHEAD < tiles:
                n = (i + AHEAD) % STAGES
                gather_rows(
                    values, ropes, kb0.index(n), kb1.index(n), kb2.index(n), kb3.index(n),
                    r_buffers.index(n), at,
                )  # fmt: skip
                gather_scales(scales, s_buffers.index(n), at_lane)
            async_copy.commit_group()
            ahead = begin + (i + AHEAD + 1) * 64
            at = slots_of(mine, ahead + t, stop)
            at_lane = slots_of(mine, ahead + lane, stop)
            following = begin + (i + 1) * 64 + token
            seen = gl.load(mine + following, mask=following < stop, other=-1) >= 0
        g0, g1, g2, g3 = tile_scales(s_buffers.index(stage))
        # A weight's reference includes its token's largest scale, so that their product fits e4m3.
        most = gl.maximum(gl.maximum(g0, g1), gl.maximum(g2, g3))
        lift = gl.convert_layout(gl.log2(gl.maximum(most, 1e-20)), gl.SliceLayout(1, SCORES))
        v0 = values_operand(kb0.index(stage))
        v1 = values_operand(kb1.index(stage))
        s0, s1, s2, s3, sr = warpgroup_mma_wait(0, deps=[s0, s1, s2, s3, sr])
        p = s0 * g0[:, None] + s1 * g1[:, None] + s2 * g2[:, None] + s3 * g3[:, None]
        p = p * column_scale[None, :] + gl.convert_layout(sr, MMA8) * scale
        x, y = gl.split(p.reshape([64, 8, 2]))
        p = gl.where(here[:, None], gl.convert_layout(x + y, SCORES), NEVER)
        m_buffer.store(gl.max((p + lift[:, None]).reshape([4, 16, 8]), 1))
        tile_m = gl.ceil(gl.max(m_buffer.load(WARPS), 0))
        p = gl.exp2(p - gl.convert_layout(tile_m, gl.SliceLayout(0, SCORES))[None, :])
        l_buffer.store(gl.sum(p.reshape([4, 16, 8]), 1))
        p = p * LIFT
        h0 = gl.convert_layout(g0, gl.SliceLayout(1, SCORES))
        h1 = gl.convert_layout(g1, gl.SliceLayout(1, SCORES))
        h2 = gl.convert_layout(g2, gl.SliceLayout(1, SCORES))
        h3 = gl.convert_layout(g3, gl.SliceLayout(1, SCORES))
        store_weights(p, h0, pb0)
        store_weights(p, h1, pb1)
        store_weights(p, h2, pb2)
        store_weights(p, h3, pb3)
        fence_async_shared()
        c0 = product(v0, pb0, none2)
        c1 = product(v1, pb1, none2)
        v2 = values_operand(kb2.index(stage))
        if not STAGED:
            c2 = product(v2, pb2, none2)
            v3 = values_operand(kb3.index(stage))
            c3 = product(v3, pb3, none2)
        tile_total = gl.sum(l_buffer.load(WARPS), 0)
        m_new = gl.maximum(m, tile_m)
        fade = power(m - m_new)
        share = power(tile_m - m_new)
        m = m_new
        total = total * fade + tile_total * share
        fade = column(fade)
        share = column(share)
        if STAGED:
            c0 = warpgroup_mma_wait(1, deps=[c0])
            c2 = product(v2, pb2, none2)
            v3 = values_operand(kb3.index(stage))
            a0 = a0 * fade + joined(c0) * share
            c1 = warpgroup_mma_wait(1, deps=[c1])
            c3 = product(v3, pb3, none2)
            a1 = a1 * fade + joined(c1) * share
            c2 = warpgroup_mma_wait(1, deps=[c2])
            a2 = a2 * fade + joined(c2) * share
            c3 = warpgroup_mma_wait(0, deps=[c3])
            a3 = a3 * fade + joined(c3) * share
        else:
            c0 = warpgroup_mma_wait(3, deps=[c0])
            a0 = a0 * fade + joined(c0) * share
            c1 = warpgroup_mma_wait(2, deps=[c1])
            a1 = a1 * fade + joined(c1) * share
            c2 = warpgroup_mma_wait(1, deps=[c2])
            a2 = a2 * fade + joined(c2) * share
            c3 = warpgroup_mma_wait(0, deps=[c3])
            a3 = a3 * fade + joined(c3) * share
        if PAIRED:
            if (i % 4 == 3) | (i + 1 == tiles):
                m_new = gl.maximum(m, pair_m)
                fade = power(pair_m - m_new)
                share = power(m - m_new)
                pair_m = m_new
                pair_total = pair_total * fade
                pair_total += total * share
                fade = column(fade)
                share = column(share)
                b0 = b0 * fade + a0 * share
                b1 = b1 * fade + a1 * share
                b2 = b2 * fade + a2 * share
                b3 = b3 * fade + a3 * share
                m = gl.full([8], NEVER, gl.float32, gl.SliceLayout(0, WARPS))
                total = gl.zeros([8], gl.float32, gl.SliceLayout(0, WARPS))
                a0 = gl.zeros([128, 8], gl.float32, SUMS)
                a1 = gl.zeros([128, 8], gl.float32, SUMS)
                a2 = gl.zeros([128, 8], gl.float32, SUMS)
                a3 = gl.zeros([128, 8], gl.float32, SUMS)
    if PAIRED:
        m = pair_m
        total = pair_total
        a0 = b0
        a1 = b1
        a2 = b2
        a3 = b3
    let_next_start()  # not before: the next kernels' weights would be in the gathers' way
    if PARTIAL:
        h = gl.arange(0, 8, layout=gl.SliceLayout(0, WARPS))
        size = sizes + (row * units + unit) * 16
        gl.store(size + h, m)
        gl.store(size + 8 + h, total)
        target = out + (row * units + unit) * 4096
        if tiles > 0:
            store_partial(a0, target)
            store_partial(a1, target + 1024)
            store_partial(a2, target + 2048)
            store_partial(a3, target + 3072)
    else:
        # Of a row without a token the first copies are still on their way, to where the conversions
        # below exchange what they store.
        async_copy.wait_group(0)
        inverse = gl.where(total > 0, 1.0 / (LIFT * gl.maximum(total, 1e-30)), 0.0)
        weight = column(inverse)
        target = out + row * 4096
        store_output(a0 * weight, target)
        store_output(a1 * weight, target + 128)
        store_output(a2 * weight, target + 256)
        store_output(a3 * weight, target + 384)
