# SPDX-License-Identifier: Apache-2.0
"""Scores of the indexer over the paged index-K cache, for decode, verify and prefill rows alike."""

from __future__ import annotations

import torch

from ..dispatch import use_kernel
from . import reference


def index_logits(
    query: torch.Tensor,
    head_weights: torch.Tensor,
    index_cache: torch.Tensor,
    page_table: torch.Tensor,
    row_seq: torch.Tensor,
    last: torch.Tensor,
    first: int,
    page_size: int,
    max_context: int,
    rows_per_sequence: int | None = None,
    fill: bool = True,
) -> torch.Tensor:
    """logits[r, p] = sum_h w[r, h] * ReLU(q[r, h] . k[p]) for first <= p <= last[r], else -inf.

    query        [R, Hi, Di], head_weights [R, Hi] acc (scales folded in)
    index_cache  [slots, Di]; or uint8 [slots, 132] (see `quant`) with an e4m3 query
    page_table   [S, P] int32, row_seq [R] the row's line in it; rows of one sequence are adjacent
    last         [R] int64, the last position that the row sees; `first` is common to all rows
    rows_per_sequence  where every sequence has so many rows, the kernel reads each key once for
                 up to nine of them; None when sequences differ
    fill         False leaves places that a row does not see undefined, for a `topk_select` that is
                 told `last` and `first`; the reference always fills them
    -> [R, max_context] acc, max_context > max(last)
    """
    rows, heads, dim = query.shape
    assert head_weights.shape == (rows, heads)
    assert index_cache.dtype == torch.uint8 or index_cache.shape[1] == dim, index_cache.shape
    assert row_seq.shape == (rows,)
    assert last.shape == (rows,)
    assert page_table.dim() == 2
    assert max_context <= page_table.shape[1] * page_size, (max_context, page_table.shape)
    if query.is_cuda:
        from . import kernel

        if use_kernel("index_logits", "cuda", kernel.unserved(query, index_cache, page_size)):
            return kernel.index_logits(
                query, head_weights, index_cache, page_table, row_seq, last, first, max_context,
                rows_per_sequence, fill,
            )  # fmt: skip
    return reference.index_logits(
        query, head_weights, index_cache, page_table, row_seq, last, first, page_size, max_context
    )
