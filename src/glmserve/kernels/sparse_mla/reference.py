# SPDX-License-Identifier: Apache-2.0
"""o = softmax(q K^T * scale) C by row: K = cache[slots], C its first kv_lora columns."""

from __future__ import annotations

import torch

from ..precision import acc_dtype
from ..quant import unpack_latent_rows

_MAX_GATHERED = 1 << 24  # cache elements gathered at once (64 MB in fp32)


def sparse_mla(
    query: torch.Tensor,
    latent_cache: torch.Tensor,
    slots: torch.Tensor,
    kv_lora_rank: int,
    scale: float,
) -> torch.Tensor:
    rows = max(1, _MAX_GATHERED // (slots.shape[1] * latent_cache.shape[1]))
    parts = [
        _attend(q, latent_cache, s, kv_lora_rank, scale)
        for q, s in zip(torch.split(query, rows), torch.split(slots, rows), strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend(
    query: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, kv_lora_rank: int, scale: float
) -> torch.Tensor:
    acc = acc_dtype(query.dtype)
    unused = (slots < 0)[:, None, :]
    keys = cache.index_select(0, slots.clamp_min(0).flatten())  # faster than cache[slots]
    if keys.dtype == torch.uint8:
        keys = unpack_latent_rows(keys)
    keys = keys.view(*slots.shape, -1).to(acc)  # [R, k, kv_lora + rope]
    scores = torch.bmm(query.to(acc), keys.transpose(1, 2)) * scale  # [R, H, k]
    weights = scores.masked_fill_(unused, -torch.inf).softmax(-1).masked_fill_(unused, 0.0)
    return torch.bmm(weights, keys[..., :kv_lora_rank]).to(query.dtype)
