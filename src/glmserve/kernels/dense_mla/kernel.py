# SPDX-License-Identifier: Apache-2.0
"""Latents of a sequence out of its pages, and causal flash attention with heads of 192 + 64 | 256.

Keys are walked in tiles of fixed size from the first on, so a row's sums have the same order
whatever rows share its tile.
"""

import triton
import triton.language as tl

from ..triton_common import dot, to_bf16

_NEVER = tl.constexpr(-1.0e30)  # stands for -inf without making NaN in differences


@triton.jit(do_not_specialize=["table_width", "line"])
def read_latents(
    cache, page_table, table_width, line, latents, ropes, FP8: tl.constexpr, ROWS: tl.constexpr
):
    """Program (p, i): ROWS rows of the sequence's page p, as latents [C, 512] and rope keys
    [C, 64] in bf16."""
    page = tl.load(page_table + line * table_width + tl.program_id(0))
    t = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, 512)
    r = tl.arange(0, 64)
    slot = page.to(tl.int64) * 64 + t
    target = tl.program_id(0) * 64 + t
    if FP8:
        values = cache.to(tl.pointer_type(tl.float8e4nv)) + slot[:, None] * 656 + d[None, :]
        scales = cache.to(tl.pointer_type(tl.float32)) + slot[:, None] * 164 + 128
        x = tl.load(values).to(tl.float32) * tl.load(scales + d[None, :] // 128)
        key = tl.load(cache.to(tl.pointer_type(tl.bfloat16)) + slot[:, None] * 328 + 264 + r)
        tl.store(latents + target[:, None] * 512 + d[None, :], to_bf16(x))
    else:
        x = tl.load(cache + slot[:, None] * 576 + d[None, :])
        key = tl.load(cache + slot[:, None] * 576 + 512 + r[None, :])
        tl.store(latents + target[:, None] * 512 + d[None, :], x)
    tl.store(ropes + target[:, None] * 64 + r[None, :], key)


@triton.jit(do_not_specialize=["rows", "context", "first"])
def attend_dense(
    query, rope, kv, ropes, out, rows, context, first, scale, heads,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """query [rows, heads, 256], kv [C, heads, 448] = key | value, ropes [C, 64], out [rows, heads,
    256]. `scale` includes log2(e)."""
    head = tl.program_id(1)
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the rows that see the most start first
    m = block * BM + tl.arange(0, BM)
    there = (m < rows)[:, None]
    wide = tl.arange(0, 128)[None, :]
    narrow = tl.arange(0, 64)[None, :]
    line = query + (m[:, None].to(tl.int64) * heads + head) * 256
    q0 = tl.load(line + wide, mask=there, other=0.0)
    q1 = tl.load(line + 128 + narrow, mask=there, other=0.0)
    x = tl.load(line + 192 + narrow, mask=there, other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(x, [BM, 32, 2]))
    angle = tl.load(rope + m[:, None] * 64 + narrow, mask=there, other=0.0)
    cos, sin = tl.split(tl.reshape(angle, [BM, 32, 2]))
    turned = tl.join(even * cos - odd * sin, odd * cos + even * sin)
    q2 = to_bf16(tl.reshape(turned, [BM, 64]))
    last = context - rows + m
    reach = tl.minimum(context - rows + block * BM + BM, context)
    top = tl.full([BM], _NEVER, tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, 256], tl.float32)
    d = tl.arange(0, 256)[None, :]
    n = tl.arange(0, BN)
    for begin in tl.range(0, reach, BN, num_stages=STAGES):
        t = begin + n
        at = kv + (t[:, None] * heads + head) * 448
        k0 = tl.load(at + wide)
        k1 = tl.load(at + 128 + narrow)
        k2 = tl.load(ropes + t[:, None] * 64 + narrow)
        v = tl.load(at + 192 + d)
        s = dot(q0, k0.T, tl.zeros([BM, BN], tl.float32))
        s = dot(q1, k1.T, s)
        s = dot(q2, k2.T, s) * scale
        s = tl.where((t[None, :] <= last[:, None]) & (t[None, :] >= first), s, _NEVER)
        higher = tl.maximum(top, tl.max(s, 1))
        fade = tl.exp2(top - higher)
        # A tile that a row does not see at all leaves `higher` at _NEVER: its weights are cleared.
        p = tl.where(s > _NEVER, tl.exp2(s - higher[:, None]), 0.0)
        total = total * fade + tl.sum(p, 1)
        top = higher
        acc = dot(to_bf16(p), v, acc * fade[:, None])
    result = acc / tl.maximum(total, 1e-30)[:, None]
    tl.store(out + (m[:, None].to(tl.int64) * heads + head) * 256 + d, to_bf16(result), mask=there)
