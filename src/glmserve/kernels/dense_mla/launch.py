# SPDX-License-Identifier: Apache-2.0
"""Host side of dense prefill attention: read the pages, project keys and values, attend."""

from __future__ import annotations

import math

import torch
import triton

from ..linear.launch import linear
from . import kernel

PAGE = 64
_TILE_ROWS, _TILE_KEYS = 128, 64


def unserved(
    query: torch.Tensor,
    rope: torch.Tensor,
    latent_cache: torch.Tensor,
    kv_b: torch.Tensor,
    page_size: int,
) -> dict[str, object]:
    """Dimensions that the kernels do not serve."""
    wrong: dict[str, object] = {}
    if query.shape[2] != 256 or rope.shape[1] != 32:
        wrong["query head"] = (query.shape[2] - 2 * rope.shape[1], 2 * rope.shape[1])
    if kv_b.shape[1:] != (448, 512):
        wrong["kv_b"] = tuple(kv_b.shape[1:])
    if query.dtype != torch.bfloat16 or kv_b.dtype != torch.bfloat16:
        wrong["dtype"] = (query.dtype, kv_b.dtype)
    rows = {torch.uint8: 656, torch.bfloat16: 576}
    if rows.get(latent_cache.dtype) != latent_cache.shape[1]:
        wrong["cache row"] = (latent_cache.dtype, latent_cache.shape[1])
    if page_size != PAGE:
        wrong["page size"] = page_size
    return wrong


def dense_mla(
    query: torch.Tensor,
    rope: torch.Tensor,
    latent_cache: torch.Tensor,
    page_table: torch.Tensor,
    line: int,
    kv_b: torch.Tensor,
    context: int,
    first: int,
    scale: float,
) -> torch.Tensor:
    assert query.is_contiguous(), query.stride()
    assert rope.is_contiguous(), rope.stride()
    assert kv_b.is_contiguous(), kv_b.stride()
    assert latent_cache.is_contiguous(), latent_cache.stride()
    rows, heads, _ = query.shape
    pages, device = -(-context // PAGE), query.device
    latents = torch.empty(pages * PAGE, 512, dtype=torch.bfloat16, device=device)
    ropes = torch.empty(pages * PAGE, 64, dtype=torch.bfloat16, device=device)
    kernel.read_latents[(pages, 8)](
        latent_cache, page_table, page_table.shape[1], line, latents, ropes,
        FP8=latent_cache.dtype == torch.uint8, ROWS=PAGE // 8, num_warps=4,
    )  # fmt: skip
    kv = linear(latents, kv_b.view(heads * 448, 512), torch.bfloat16)
    out = torch.empty(rows, heads * 256, dtype=query.dtype, device=device)
    kernel.attend_dense[(triton.cdiv(rows, _TILE_ROWS), heads)](
        query, rope, kv, ropes, out, rows, context, first, scale * math.log2(math.e), heads,
        BM=_TILE_ROWS, BN=_TILE_KEYS, STAGES=2, num_warps=8,
    )  # fmt: skip
    return out
