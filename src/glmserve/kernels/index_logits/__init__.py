# SPDX-License-Identifier: Apache-2.0
"""Scores of the indexer over the paged index-K cache, for decode, verify and prefill rows alike."""

from __future__ import annotations

import torch

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
) -> torch.Tensor:
    """logits[r, p] = sum_h w[r, h] * ReLU(q[r, h] . k[p]) for first <= p <= last[r], else -inf.

    query        [R, Hi, Di], head_weights [R, Hi] acc (scales folded in)
    index_cache  [slots, Di]
    page_table   [S, P] int32, row_seq [R] the row's line in it; rows of one sequence are adjacent
    last         [R] int64, the last position that the row sees; `first` is common to all rows
    -> [R, max_context] acc, max_context > max(last)
    """
    rows, heads, dim = query.shape
    assert head_weights.shape == (rows, heads)
    assert index_cache.shape[1] == dim
    assert row_seq.shape == (rows,)
    assert last.shape == (rows,)
    assert page_table.dim() == 2
    assert max_context <= page_table.shape[1] * page_size, (max_context, page_table.shape)
    return reference.index_logits(
        query, head_weights, index_cache, page_table, row_seq, last, first, page_size, max_context
    )
