# SPDX-License-Identifier: Apache-2.0
"""Absorbed multi-head latent attention over each row's own selected cache rows.

Decode, verify and prefill rows are the same thing here: a query and a list of slots. The value
up-projection is not part of it (`value_up`).
"""

from __future__ import annotations

import torch

from ..dispatch import use_kernel
from . import reference


def sparse_mla(
    query: torch.Tensor,
    latent_cache: torch.Tensor,
    slots: torch.Tensor,
    kv_lora_rank: int,
    scale: float,
) -> torch.Tensor:
    """softmax(scale * q . cache[slots]) over the selection, times the latent part of those rows.

    query         [R, H, kv_lora + rope], absorbed and roped
    latent_cache  [slots, kv_lora + rope], or uint8 [slots, 656] (see `quant`)
    slots         [R, k] int, the unused ones -1 and last; a row without any slot gives zeros
    -> [R, H, kv_lora] in the query's dtype; softmax and sums in acc
    """
    assert query.dim() == 3, query.shape
    fp8 = latent_cache.dtype == torch.uint8
    assert fp8 or query.shape[2] == latent_cache.shape[1], query.shape
    assert slots.shape[0] == query.shape[0]
    assert 0 < kv_lora_rank <= query.shape[2]
    if query.is_cuda:
        from . import launch

        unserved = launch.unserved(query, latent_cache, kv_lora_rank)
        if use_kernel("sparse_mla", "cuda", unserved):
            return launch.sparse_mla(query, latent_cache, slots, scale)
    return reference.sparse_mla(query, latent_cache, slots, kv_lora_rank, scale)
