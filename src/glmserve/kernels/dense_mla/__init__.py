# SPDX-License-Identifier: Apache-2.0
"""Attention of one sequence's prefill rows that see everything before them: dense, unabsorbed.

While a row sees no more positions than the index keeps, its selection is all of them, and a
product with per-head keys and values of 256 costs half of one with latents of 576 and 512, and
reads each key once a tile of rows instead of once a row. The latents come from the pages, so an
earlier chunk or a prefix hit is part of the context. Equal to `sparse_mla` over everything followed
by `value_up`, up to rounding.
"""

from __future__ import annotations

import torch

from ..dispatch import use_kernel
from . import reference


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
) -> torch.Tensor:
    """[R, H * v] for the sequence's rows at cache coordinates context - R .. context - 1.

    query         [R, H, nope + rope], neither absorbed nor roped; rope [R, rope / 2, 2] acc
    latent_cache  as in `sparse_mla`; the rows' own entries are written already
    page_table    [S, P] int32, of which `line` is the sequence's
    kv_b          [H, nope + v, kv_lora]: the up-projection of keys and values
    Row i sees coordinates first .. context - R + i; softmax and sums in acc.
    """
    rows, heads, width = query.shape
    rope_dim = 2 * rope.shape[1]
    assert 0 < rows <= context - first, (rows, context, first)
    assert kv_b.shape[0] == heads, (query.shape, kv_b.shape)
    assert rope.shape[0] == rows, (query.shape, rope.shape)
    assert context <= page_table.shape[1] * page_size, (context, page_table.shape)
    nope = width - rope_dim
    if query.is_cuda:
        from . import launch

        odd = launch.unserved(query, rope, latent_cache, kv_b, page_size)
        if use_kernel("dense_mla", "cuda", odd):
            return launch.dense_mla(
                query, rope, latent_cache, page_table, line, kv_b, context, first, scale
            )
    return reference.dense_mla(
        query, rope, latent_cache, page_table, line, kv_b, context, first, scale, page_size, nope
    )
