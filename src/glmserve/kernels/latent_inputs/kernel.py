# SPDX-License-Identifier: Apache-2.0
"""Norms, RoPE, quantisation and cache writes behind the A-projection, in the Triton language.

Two programs a row: one norms the query latent, the other does everything that goes to a cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..quant import latent_row_bytes
from ..triton_common import divide, power_of_two_above, to_bf16, to_e4m3
from .reference import IndexKeyNorm

_LEAST = tl.constexpr(1e-4)  # quant.SMALLEST_AMAX


@triton.jit
def _turn(even, odd, rope, row, HALF: tl.constexpr, i):
    """Rotates pairs i by the row's angles; pairs from HALF on stay as they are."""
    at = rope + (row * HALF + i) * 2
    cos = tl.load(at, mask=i < HALF, other=1.0)
    sin = tl.load(at + 1, mask=i < HALF, other=0.0)
    return even * cos - odd * sin, odd * cos + even * sin


@triton.jit
def _write_index_key(
    x, rope, row, slot, cache, norm_weight, norm_bias, norm_eps, FP8: tl.constexpr
):
    i = tl.arange(0, 64)
    even = tl.load(x + 2 * i).to(tl.float32)
    odd = tl.load(x + 2 * i + 1).to(tl.float32)
    mean = (tl.sum(even, 0) + tl.sum(odd, 0)) * (1.0 / 128)
    even -= mean
    odd -= mean
    spread = (tl.sum(even * even, 0) + tl.sum(odd * odd, 0)) * (1.0 / 128)
    scale = tl.rsqrt(spread + norm_eps)
    even = even * scale * tl.load(norm_weight + 2 * i).to(tl.float32)
    even += tl.load(norm_bias + 2 * i).to(tl.float32)
    odd = odd * scale * tl.load(norm_weight + 2 * i + 1).to(tl.float32)
    odd += tl.load(norm_bias + 2 * i + 1).to(tl.float32)
    even, odd = _turn(even, odd, rope, row, 32, i)
    if FP8:
        top = tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), 0)
        step = power_of_two_above(divide(tl.maximum(top, _LEAST), 448.0 + top * 0.0))
        page = (slot // 64).to(tl.int64)
        key = cache.to(tl.pointer_type(tl.float8e4nv)) + page * 8448 + (slot % 64) * 128 + 2 * i
        tl.store(key, to_e4m3(even / step))  # exact: a power of two
        tl.store(key + 1, to_e4m3(odd / step))
        scales = cache.to(tl.pointer_type(tl.float32)) + page * 2112 + 2048
        tl.store(scales + slot % 64, step)
    else:
        key = cache + slot.to(tl.int64) * 128 + 2 * i
        tl.store(key, to_bf16(even))
        tl.store(key + 1, to_bf16(odd))


@triton.jit
def split_norm_write(
    projected, stride, index_projected, index_stride, q_norm, kv_norm, rope, slots, q_latent,
    latent_cache, index_cache, index_weight, index_bias, eps, index_eps,
    Q: tl.constexpr, LATENT: tl.constexpr,
    FP8: tl.constexpr, INDEX: tl.constexpr, INDEX_FP8: tl.constexpr,
):  # fmt: skip
    ROW_BYTES: tl.constexpr = LATENT + LATENT // 32 + 128  # values, scales, rope
    row = tl.program_id(0)
    x = projected + row.to(tl.int64) * stride
    if tl.program_id(1) == 0:
        c = tl.arange(0, Q)
        q = tl.load(x + c).to(tl.float32)
        q = q * tl.rsqrt(tl.sum(q * q, 0) * (1.0 / Q) + eps)
        tl.store(q_latent + row * Q + c, to_bf16(q * tl.load(q_norm + c).to(tl.float32)))
    else:
        slot = tl.load(slots + row)
        wide = slot.to(tl.int64)
        g = tl.arange(0, LATENT // 128)
        d = g[:, None] * 128 + tl.arange(0, 128)[None, :]
        kv = tl.load(x + Q + d).to(tl.float32)
        scale = tl.rsqrt(tl.sum(tl.sum(kv * kv, 1), 0) * (1.0 / LATENT) + eps)
        kv = kv * scale * tl.load(kv_norm + d).to(tl.float32)
        i = tl.arange(0, 32)
        even = tl.load(x + Q + LATENT + 2 * i).to(tl.float32)
        odd = tl.load(x + Q + LATENT + 2 * i + 1).to(tl.float32)
        even, odd = _turn(even, odd, rope, row, 32, i)
        if FP8:
            top = tl.maximum(tl.max(tl.abs(kv), 1), _LEAST)
            step = divide(top, 448.0 + top * 0.0)
            values = latent_cache.to(tl.pointer_type(tl.float8e4nv)) + wide * ROW_BYTES
            tl.store(values + d, to_e4m3(divide(kv, step[:, None] + kv * 0.0)))
            scales = latent_cache.to(tl.pointer_type(tl.float32)) + wide * (ROW_BYTES // 4)
            tl.store(scales + LATENT // 4 + g, step)
            key = latent_cache.to(tl.pointer_type(tl.bfloat16)) + wide * (ROW_BYTES // 2)
            key += ROW_BYTES // 2 - 64
        else:
            tl.store(latent_cache + wide * (LATENT + 64) + d, to_bf16(kv))
            key = latent_cache + wide * (LATENT + 64) + LATENT
        tl.store(key + 2 * i, to_bf16(even))
        tl.store(key + 2 * i + 1, to_bf16(odd))
        if INDEX:
            _write_index_key(
                index_projected + row.to(tl.int64) * index_stride, rope, row, slot, index_cache,
                index_weight, index_bias, index_eps, INDEX_FP8,
            )  # fmt: skip


def unserved(
    projected: torch.Tensor,
    q_norm: torch.Tensor,
    kv_norm: torch.Tensor,
    rope: torch.Tensor,
    latent_cache: torch.Tensor,
    index_cache: torch.Tensor | None,
) -> dict[str, object]:
    """Dimensions that the kernel does not serve."""
    wrong: dict[str, object] = {}
    q = q_norm.shape[0]
    if q & (q - 1) or q > 4096:
        wrong["q_lora_rank"] = q
    latent = kv_norm.shape[0]
    if latent not in (128, 256, 512) or rope.shape[1] != 32:
        wrong["latent row"] = (latent, 2 * rope.shape[1])
    if projected.dtype != torch.bfloat16:
        wrong["dtype"] = projected.dtype
    rows = {torch.uint8: latent_row_bytes(latent), torch.bfloat16: latent + 64}
    if rows.get(latent_cache.dtype) != latent_cache.shape[1]:
        wrong["cache row"] = (latent_cache.dtype, latent_cache.shape[1])
    rows = {torch.uint8: 132, torch.bfloat16: 128}
    if index_cache is not None and rows.get(index_cache.dtype) != index_cache.shape[1]:
        wrong["index row"] = (index_cache.dtype, index_cache.shape[1])
    return wrong


def latent_inputs(
    projected: torch.Tensor,
    q_norm: torch.Tensor,
    kv_norm: torch.Tensor,
    rope: torch.Tensor,
    slots: torch.Tensor,
    latent_cache: torch.Tensor,
    index_cache: torch.Tensor | None,
    index_norm: IndexKeyNorm | None,
    eps: float,
    index_projected: torch.Tensor | None = None,
) -> torch.Tensor:
    assert projected.stride(1) == 1, projected.stride()
    assert rope.is_contiguous(), rope.stride()
    assert latent_cache.is_contiguous(), latent_cache.stride()
    rows, q = len(projected), q_norm.shape[0]
    q_latent = torch.empty(rows, q, dtype=projected.dtype, device=projected.device)
    if rows == 0:
        return q_latent
    if index_cache is not None and index_norm is not None:
        assert index_cache.is_contiguous(), index_cache.stride()
        index = (index_cache, index_norm.weight, index_norm.bias, index_norm.eps)
    else:  # never read
        index = (latent_cache, q_norm, q_norm, 0.0)
    keys = projected
    if index_cache is not None:
        keys = projected[:, q + len(kv_norm) + 64 :] if index_projected is None else index_projected
    assert keys.stride(1) == 1, keys.stride()
    split_norm_write[(rows, 2)](
        projected, projected.stride(0), keys, keys.stride(0), q_norm, kv_norm, rope, slots,
        q_latent, latent_cache, *index[:3], eps, index[3],
        Q=q, LATENT=len(kv_norm), FP8=latent_cache.dtype == torch.uint8,
        INDEX=index_cache is not None, INDEX_FP8=index[0].dtype == torch.uint8, num_warps=4,
    )  # fmt: skip
    return q_latent
