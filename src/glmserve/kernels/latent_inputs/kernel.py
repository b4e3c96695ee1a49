# SPDX-License-Identifier: Apache-2.0
"""Norms, RoPE, quantisation and cache writes behind the A-projection, in the Triton language.

Two or three programs a row: the query latent, in fp8 as well where it is asked for; the cached
latent; the index key.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..linear.parts import MOST_CHUNKS, add_parts
from ..pdl import pdl
from ..quant import latent_row_bytes
from ..quantise.kernel import quantise_groups
from ..quantise.launch import empty_rows
from ..residual_norm import Normed
from ..triton_common import (
    divide,
    let_next_start,
    power_of_two_above,
    to_bf16,
    to_e4m3,
    wait_for_previous,
)
from .reference import IndexKeyNorm

_LEAST = tl.constexpr(1e-4)  # quant.SMALLEST_AMAX


@triton.jit
def _turn(x, rope, row, WIDTH: tl.constexpr):
    """Rotates the first 64 values of x [WIDTH] by the row's angles; the others stay as they are."""
    even, odd = tl.split(tl.reshape(x, [WIDTH // 2, 2]))
    i = tl.arange(0, WIDTH // 2)
    at = rope + (row * 32 + i) * 2
    cos = tl.load(at, mask=i < 32, other=1.0)
    sin = tl.load(at + 1, mask=i < 32, other=0.0)
    turned = tl.join(even * cos - odd * sin, odd * cos + even * sin)
    return tl.reshape(turned, [WIDTH])


@triton.jit
def _write_q_latent(
    x, row, rows, gain, q_latent, values, scales, eps, Q: tl.constexpr, QUANTISE: tl.constexpr
):
    WIDTH: tl.constexpr = 128 if QUANTISE else Q
    g = tl.arange(0, Q // WIDTH)
    c = g[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    gain = tl.load(gain + c).to(tl.float32)
    wait_for_previous()
    q = tl.load(x + c).to(tl.float32)
    scale = tl.rsqrt(tl.sum(tl.sum(q * q, 1), 0) * (1.0 / Q) + eps)
    result = to_bf16(q * scale * gain)
    at = row.to(tl.int64) * Q + c
    tl.store(q_latent + at, result)
    if QUANTISE:
        quantised, scale = quantise_groups(result.to(tl.float32))
        tl.store(tl.max_contiguous(values + at, (1, 8)), quantised)
        tl.store(scales + g * rows + row, scale)


@triton.jit
def _write_latent(x, rope, row, slots, gain, cache, eps, LATENT: tl.constexpr, FP8: tl.constexpr):
    ROW_BYTES: tl.constexpr = LATENT + LATENT // 32 + 128  # values, scales, rope
    g = tl.arange(0, LATENT // 128)
    d = g[:, None] * 128 + tl.arange(0, 128)[None, :]
    i = tl.arange(0, 64)
    gain = tl.load(gain + d).to(tl.float32)
    wait_for_previous()
    wide = tl.load(slots + row).to(tl.int64)
    kv = tl.load(x + d).to(tl.float32)
    key = _turn(tl.load(x + LATENT + i).to(tl.float32), rope, row, 64)
    scale = tl.rsqrt(tl.sum(tl.sum(kv * kv, 1), 0) * (1.0 / LATENT) + eps)
    kv = kv * scale * gain
    if FP8:
        top = tl.maximum(tl.max(tl.abs(kv), 1), _LEAST)
        step = divide(top, 448.0 + top * 0.0)
        values = cache.to(tl.pointer_type(tl.float8e4nv)) + wide * ROW_BYTES
        tl.store(values + d, to_e4m3(divide(kv, step[:, None] + kv * 0.0)))
        scales = cache.to(tl.pointer_type(tl.float32)) + wide * (ROW_BYTES // 4)
        tl.store(scales + LATENT // 4 + g, step)
        place = cache.to(tl.pointer_type(tl.bfloat16)) + wide * (ROW_BYTES // 2)
        tl.store(place + ROW_BYTES // 2 - 64 + i, to_bf16(key))
    else:
        tl.store(cache + wide * (LATENT + 64) + d, to_bf16(kv))
        tl.store(cache + wide * (LATENT + 64) + LATENT + i, to_bf16(key))


@triton.jit
def _write_index_key(
    x, step, parts, rope, row, slots, cache, norm_weight, norm_bias, norm_eps, FP8: tl.constexpr
):
    i = tl.arange(0, 128)
    weight = tl.load(norm_weight + i).to(tl.float32)
    bias = tl.load(norm_bias + i).to(tl.float32)
    wait_for_previous()
    slot = tl.load(slots + row).to(tl.int64)
    key = add_parts(x + i, step, parts, i < 128)
    key -= tl.sum(key, 0) * (1.0 / 128)
    scale = tl.rsqrt(tl.sum(key * key, 0) * (1.0 / 128) + norm_eps)
    key = _turn(key * scale * weight + bias, rope, row, 128)
    if FP8:
        top = tl.max(tl.abs(key), 0)
        step = power_of_two_above(divide(tl.maximum(top, _LEAST), 448.0 + top * 0.0))
        page = slot // 64
        place = cache.to(tl.pointer_type(tl.float8e4nv)) + page * 8448 + (slot % 64) * 128
        tl.store(place + i, to_e4m3(key / step))  # exact: a power of two
        scales = cache.to(tl.pointer_type(tl.float32)) + page * 2112 + 2048
        tl.store(scales + slot % 64, step)
    else:
        tl.store(cache + slot * 128 + i, to_bf16(key))


@triton.jit(do_not_specialize=["rows", "index_step", "index_parts"])
def split_norm_write(
    projected, stride, index_projected, index_stride, index_step, index_parts, q_norm, kv_norm,
    rope, slots, q_latent, values, scales, latent_cache, index_cache, index_weight, index_bias,
    eps, index_eps, rows,
    Q: tl.constexpr, LATENT: tl.constexpr, QUANTISE: tl.constexpr,
    FP8: tl.constexpr, INDEX: tl.constexpr, INDEX_FP8: tl.constexpr,
):  # fmt: skip
    """Program (r, 0) norms the query latent of row r, (r, 1) writes its latent, (r, 2) its index
    key, whose projection comes in so many parts, index_step from each other."""
    let_next_start()
    row = tl.program_id(0)
    part = tl.program_id(1)
    x = projected + row.to(tl.int64) * stride
    if part == 0:
        _write_q_latent(x, row, rows, q_norm, q_latent, values, scales, eps, Q, QUANTISE)
    elif part == 1:
        _write_latent(x + Q, rope, row, slots, kv_norm, latent_cache, eps, LATENT, FP8)
    elif INDEX:
        _write_index_key(
            index_projected + row.to(tl.int64) * index_stride, index_step, index_parts, rope, row,
            slots, index_cache, index_weight, index_bias, index_eps, INDEX_FP8,
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
    quantised: bool = False,
) -> Normed:
    assert projected.stride(1) == 1, projected.stride()
    assert rope.is_contiguous(), rope.stride()
    assert latent_cache.is_contiguous(), latent_cache.stride()
    rows, q = len(projected), q_norm.shape[0]
    q_latent = torch.empty(rows, q, dtype=projected.dtype, device=projected.device)
    rows8 = empty_rows(rows, q, projected.device) if quantised else None
    if rows == 0:
        return Normed(q_latent, rows8)
    if index_cache is not None and index_norm is not None:
        assert index_cache.is_contiguous(), index_cache.stride()
        index = (index_cache, index_norm.weight, index_norm.bias, index_norm.eps)
    else:  # never read
        index = (latent_cache, q_norm, q_norm, 0.0)
    keys = projected[None]
    if index_cache is not None:
        behind = keys[:, :, q + len(kv_norm) + 64 :]
        keys = behind if index_projected is None else index_projected
    assert keys.stride(2) == 1, keys.stride()
    assert len(keys) <= MOST_CHUNKS.value, keys.shape
    split_norm_write[(rows, 2 + (index_cache is not None))](
        projected, projected.stride(0), keys, keys.stride(1), keys.stride(0), len(keys), q_norm,
        kv_norm, rope, slots, q_latent, q_latent if rows8 is None else rows8.values,
        q_norm if rows8 is None else rows8.scales, latent_cache, *index[:3], eps, index[3], rows,
        Q=q, LATENT=len(kv_norm), QUANTISE=quantised, FP8=latent_cache.dtype == torch.uint8,
        INDEX=index_cache is not None, INDEX_FP8=index[0].dtype == torch.uint8, num_warps=4,
        **pdl(),
    )  # fmt: skip
    return Normed(q_latent, rows8)
