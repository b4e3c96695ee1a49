# SPDX-License-Identifier: Apache-2.0
"""The query half of an attention layer: RoPE and absorption of the main heads, RoPE of the index
heads and the scaling of their weights. Cache reads are the jobs of `sparse_mla` and `index_logits`.
"""

from __future__ import annotations

import torch

from ..dispatch import use_kernel
from . import reference


def absorb_query(query: torch.Tensor, w_uk: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """[R, H, nope + rope] -> [R, H, kv_lora + rope]: the nope part times W_UK, the rest roped.

    w_uk [H, nope, kv_lora] is the key half of kv_b_proj, so that q_nope . k_nope = absorbed . c.
    """
    rows, heads, width = query.shape
    nope = w_uk.shape[1]
    assert w_uk.shape[0] == heads, (query.shape, w_uk.shape)
    assert width == nope + 2 * rope.shape[1], (query.shape, w_uk.shape)
    assert rope.shape[0] == rows
    if query.is_cuda:
        from . import kernel

        if use_kernel("absorb_query", "cuda", kernel.absorb_unserved(query, w_uk, rope)):
            return kernel.absorb_query(query, w_uk, rope)
    return reference.absorb_query(query, w_uk, rope)


def index_query(
    query: torch.Tensor, head_weights: torch.Tensor, rope: torch.Tensor, fp8: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Index queries [R, Hi, Di] with their first `rope` dimensions roped, same dtype; and the head
    weights, of [C, R, Hi] as `linear_parts` gives them, [R, Hi] in acc with both constants
    (Di^-0.5 and Hi^-0.5) folded in.

    With fp8 the queries are e4m3, for an fp8 index cache, and each head's weight has its query's
    scale as well."""
    assert head_weights.shape[1:] == query.shape[:2], (query.shape, head_weights.shape)
    assert rope.shape[0] == query.shape[0]
    assert query.shape[2] >= 2 * rope.shape[1], (query.shape, rope.shape)
    if query.is_cuda:
        from . import kernel

        if use_kernel("index_query", "cuda", kernel.index_unserved(query, rope)):
            return kernel.index_query(query, head_weights, rope, fp8)
    return reference.index_query(query, head_weights, rope, fp8)
