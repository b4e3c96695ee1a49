# SPDX-License-Identifier: Apache-2.0
"""k = [W_UK c | shared rope key], v = W_UV c, o = softmax(q k^T * scale, causal) v, by head."""

from __future__ import annotations

import torch

from ..precision import acc_dtype
from ..quant import unpack_latent_rows
from ..rope.reference import rotate


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
    page_size: int,
    nope: int,
) -> torch.Tensor:
    acc, rows = acc_dtype(query.dtype), len(query)
    place = torch.arange(context, device=query.device)
    slots = page_table[line].long()[place // page_size] * page_size + place % page_size
    latents = latent_cache.index_select(0, slots)
    if latents.dtype == torch.uint8:
        latents = unpack_latent_rows(latents)
    latents = latents.to(acc)
    kv = torch.einsum("tc,hnc->thn", latents[:, : kv_b.shape[2]], kv_b.to(acc))
    q_rope = rotate(query[..., nope:], rope).to(query.dtype).to(acc)
    scores = torch.einsum("rhd,thd->hrt", query[..., :nope].to(acc), kv[..., :nope])
    scores = scores + torch.einsum("rhd,td->hrt", q_rope, latents[:, kv_b.shape[2] :])
    last = torch.arange(context - rows, context, device=query.device)
    hidden = (place > last[:, None]) | (place < first)
    weights = (scores * scale).masked_fill_(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hrt,thv->rhv", weights, kv[..., nope:]).to(query.dtype).flatten(1)
