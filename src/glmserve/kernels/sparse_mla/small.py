# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""Sparse MLA for small models: latents of 128 and 256, and fewer than eight heads a rank.

A program walks over a row's whole selection for up to 16 heads. Rows of fp8 are dequantised to bf16
as they are read. Not its job: GLM's own sizes (`kernel`, `hopper`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..pdl import pdl
from ..triton_common import dot, let_next_start, to_bf16, wait_for_previous

_NEVER = tl.constexpr(-1.0e30)  # stands for -inf without making NaN in differences


@triton.jit(do_not_specialize=["k"])
def attend_small(
    query, cache, slots, out, scale, k, all_heads,
    LATENT: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """query [R, H, LATENT + 64], slots [R, k], out [R, H, LATENT]; `scale` includes log2(e)."""
    ROW_BYTES: tl.constexpr = LATENT + LATENT // 32 + 128  # values, scales, rope
    REPEAT: tl.constexpr = 16 // HEADS  # columns of a head: products are 16 wide at least
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, 16)
    head = tl.program_id(1) * HEADS + c // REPEAT
    d = tl.arange(0, LATENT)[None, :]
    r = tl.arange(0, 64)[None, :]
    t = tl.arange(0, TILE)
    let_next_start()
    wait_for_previous()
    line = query + (row * all_heads + head)[:, None] * (LATENT + 64)
    q = tl.load(line + d)
    q_rope = tl.load(line + LATENT + r)
    top = tl.full([16], _NEVER, tl.float32)
    total = tl.zeros([16], tl.float32)
    acc = tl.zeros([LATENT, 16], tl.float32)
    for begin in tl.range(0, k, TILE):
        slot = tl.load(slots + row * k + begin + t, mask=begin + t < k, other=-1)
        seen = (slot >= 0)[:, None]
        place = tl.maximum(slot, 0).to(tl.int64)[:, None]
        if FP8:
            values = cache.to(tl.pointer_type(tl.float8e4nv)) + place * ROW_BYTES
            scales = cache.to(tl.pointer_type(tl.float32)) + place * (ROW_BYTES // 4)
            keys = tl.load(values + d, mask=seen, other=0.0).to(tl.float32)
            keys = to_bf16(keys * tl.load(scales + LATENT // 4 + d // 128, mask=seen, other=0.0))
            rope = cache.to(tl.pointer_type(tl.bfloat16)) + place * (ROW_BYTES // 2)
            rope += ROW_BYTES // 2 - 64
        else:
            keys = tl.load(cache + place * (LATENT + 64) + d, mask=seen, other=0.0)
            rope = cache + place * (LATENT + 64) + LATENT
        s = dot(keys, q.T, tl.zeros([TILE, 16], tl.float32))
        s = dot(tl.load(rope + r, mask=seen, other=0.0), q_rope.T, s)
        s = tl.where(seen, s * scale, _NEVER)
        higher = tl.maximum(top, tl.max(s, 0))
        fade = tl.exp2(top - higher)
        p = tl.where(seen, tl.exp2(s - higher[None, :]), 0.0)
        total = total * fade + tl.sum(p, 0)
        top = higher
        acc = dot(keys.T, to_bf16(p), acc * fade[None, :])
    result = acc * tl.where(total > 0, 1.0 / tl.maximum(total, 1e-30), 0.0)[None, :]
    target = out + (row * all_heads + head)[None, :] * LATENT + tl.arange(0, LATENT)[:, None]
    tl.store(target, to_bf16(result), mask=(c % REPEAT == 0)[None, :])


def attend(
    query: torch.Tensor, latent_cache: torch.Tensor, slots: torch.Tensor, scale: float
) -> torch.Tensor:
    """As the operator; `scale` includes log2(e)."""
    rows, all_heads, width = query.shape
    out = torch.empty(rows, all_heads, width - 64, dtype=query.dtype, device=query.device)
    heads = min(all_heads, 16)
    if rows:
        attend_small[(rows, all_heads // heads)](
            query, latent_cache, slots, out, scale, slots.shape[1], all_heads, LATENT=width - 64,
            HEADS=heads, TILE=32, FP8=latent_cache.dtype == torch.uint8, num_warps=4, **pdl(),
        )  # fmt: skip
    return out
