# SPDX-License-Identifier: Apache-2.0
"""One gather of a sequence's keys serves all of its rows; sequences with equally many rows are
computed together, so a decode step is one batched product however many sequences it has.
"""

from __future__ import annotations

import torch

from ..quant import read_index_pages

_MAX_SCORES = 1 << 24  # per-head scores alive at once (64 MB in fp32)


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
    rows, heads, dim = query.shape
    logits = head_weights.new_full((rows, max_context), -torch.inf)
    for run in _runs_of_equal_length(row_seq):  # [n, q] row numbers: n sequences of q rows
        ends = last[run]
        context = int(ends.max()) + 1
        positions = torch.arange(context, dtype=torch.int32, device=query.device)
        step_n = max(1, _MAX_SCORES // (run.shape[1] * heads * context))
        step_q = max(1, _MAX_SCORES // (heads * context))
        for part, part_ends in zip(
            torch.split(run, step_n), torch.split(ends, step_n), strict=True
        ):
            pages = page_table[row_seq[part[:, 0]], : -(-context // page_size)]
            # A shorter sequence has no page there; what is read instead is hidden below.
            keys = _keys(index_cache, pages.clamp_min(0), page_size, dim)[:, :context]
            keys = keys.to(head_weights.dtype).transpose(1, 2)  # [n, Di, context]
            columns = zip(
                torch.split(part, step_q, dim=1), torch.split(part_ends, step_q, dim=1), strict=True
            )
            for queries, seen in columns:
                scores = _scores(query[queries], head_weights[queries], keys)
                scores.masked_fill_(positions > seen[..., None], -torch.inf)
                logits[queries, :context] = scores
    logits[:, :first] = -torch.inf
    return logits


def _keys(cache: torch.Tensor, pages: torch.Tensor, page_size: int, dim: int) -> torch.Tensor:
    """The keys [n, pages * page_size, Di] of physical pages [n, pages]."""
    if cache.dtype == torch.uint8:
        return read_index_pages(cache, pages.long()).flatten(1, 2)
    paged = cache.view(-1, page_size, dim)
    return paged.index_select(0, pages.flatten()).view(len(pages), -1, dim)


def _scores(query: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """[n, q, Hi, Di], [n, q, Hi], [n, Di, context] -> [n, q, context] in the weights' dtype."""
    n, q, heads, _ = query.shape
    dots = torch.bmm(query.to(weights.dtype).flatten(1, 2), keys).relu_()
    return torch.matmul(weights[..., None, :], dots.view(n, q, heads, -1)).squeeze(-2)


def _runs_of_equal_length(row_seq: torch.Tensor) -> list[torch.Tensor]:
    """Row numbers of adjacent rows of a sequence, stacked by how many rows the sequence has."""
    _, counts = torch.unique_consecutive(row_seq, return_counts=True)
    starts = counts.cumsum(0) - counts
    return [
        starts[counts == q][:, None] + torch.arange(q, device=row_seq.device)
        for q in counts.unique().tolist()
    ]
