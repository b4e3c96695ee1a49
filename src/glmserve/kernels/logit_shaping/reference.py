# SPDX-License-Identifier: Apache-2.0
"""Logit shaping as plain torch over the tables; in fp32 the kernels give the same bits.

Order as in vLLM's sampler: allowed ids, bad words, min_tokens, logit_bias, penalties.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .tables import LISTED, LONGEST_WORD, SHAPED, WORDS, ShapingTables


def shape(
    logits: Tensor,
    tables: ShapingTables | None,
    first: int,
    rows: Tensor,
    positions: Tensor,
    ahead: Tensor,
    stops: Tensor,
    stops_from: Tensor,
) -> Tensor:
    """As the operator."""
    flags = torch.zeros_like(rows) if tables is None else tables.flags[rows]
    if tables is not None and bool((flags & LISTED).any()):
        shut = ~_bits(tables.allowed[rows], logits.shape[1])
        logits = logits.masked_fill(shut & ((flags & LISTED) > 0)[:, None], -torch.inf)
    if tables is not None and bool((flags & WORDS).any()):
        logits = _mask_ids(logits, _completions(tables, rows, ahead, flags) - first)
    early = positions < stops_from[rows]
    if bool(early.any()):
        logits = _mask_ids(logits, torch.where(early[:, None], stops[rows], -1) - first)
    if tables is not None and bool((flags & SHAPED).any()):
        logits = _penalised(logits, tables, first, rows, ahead, flags)
    return logits


def confirm(tables: ShapingTables, first: int, rows: Tensor, tokens: Tensor, count: Tensor) -> None:
    """As the operator."""
    flags = tables.flags[rows]
    local = tokens.to(torch.int64) - first
    taken = torch.arange(tokens.shape[1], device=tokens.device) < count[:, None]
    counted = taken & (local >= 0) & (local < tables.counts.shape[1])
    counted &= (flags & SHAPED > 0)[:, None]
    line, at = torch.nonzero(counted, as_tuple=True)
    ones = torch.ones(len(line), dtype=torch.int32, device=tokens.device)
    tables.counts.index_put_((rows[line], local[line, at]), ones, accumulate=True)
    kept = (flags & WORDS > 0) & (count > 0)
    rows, tokens, count = rows[kept], tokens[kept], count[kept]
    both = torch.cat([tables.recent[rows], tokens.to(torch.int32)], dim=1)
    newest = torch.arange(LONGEST_WORD, device=tokens.device) + count[:, None]
    tables.recent[rows] = both.gather(1, newest.to(torch.int64))


def _completions(tables: ShapingTables, rows: Tensor, ahead: Tensor, flags: Tensor) -> Tensor:
    """Ids [M, MOST_WORDS] that would complete a bad word, or -1."""
    known = torch.cat([tables.recent[rows].to(torch.int64), ahead.to(torch.int64)], dim=1)
    place = torch.arange(LONGEST_WORD - 1, device=rows.device) + 1
    past = known.gather(1, place + (ahead >= 0).sum(1)[:, None])  # the last tokens
    words = tables.words[rows]
    prefix = words[:, :, :-1]
    meets = ((prefix == past[:, None, :]) | (prefix < 0)).all(dim=2)
    return torch.where(meets & (flags & WORDS > 0)[:, None], words[:, :, -1].to(torch.int64), -1)


def _penalised(
    logits: Tensor, tables: ShapingTables, first: int, rows: Tensor, ahead: Tensor, flags: Tensor
) -> Tensor:
    """Logit bias, then repetition, frequency and presence penalties."""
    width = logits.shape[1]
    local = ahead.to(torch.int64) - first
    inside = (ahead >= 0) & (local >= 0) & (local < width)
    count = tables.counts[rows].scatter_add(
        1, torch.where(inside, local, 0), inside.to(torch.int32)
    )
    presence, frequency, repetition = tables.penalties[rows].to(logits.dtype)[..., None].unbind(1)
    shaped = logits + tables.bias[rows].to(logits.dtype)
    seen = _bits(tables.in_prompt[rows], width) | (count > 0)
    repeated = torch.where(shaped > 0, shaped / repetition, shaped * repetition)
    shaped = torch.where(seen, repeated, shaped)
    shaped = shaped - frequency * count.to(logits.dtype) - presence * (count > 0)
    return torch.where((flags & SHAPED > 0)[:, None], shaped, logits)


def _bits(words: Tensor, width: int) -> Tensor:
    """[M, words] bits -> [M, width] bool."""
    column = torch.arange(width, device=words.device)
    return (words[:, column >> 5] >> (column & 31).to(torch.int32)) & 1 > 0


def _mask_ids(logits: Tensor, columns: Tensor) -> Tensor:
    """-inf at `columns` [M, n] of each row; columns outside the shard are ignored."""
    inside = (columns >= 0) & (columns < logits.shape[1])
    mask = torch.zeros(logits.shape, dtype=torch.int64, device=logits.device)
    mask.scatter_add_(1, torch.where(inside, columns, 0), inside.to(torch.int64))
    return logits.masked_fill(mask > 0, -torch.inf)


def shut_ids(logits: Tensor, places: Tensor, bits: Tensor, first: int, first_word: int) -> None:
    """As the operator."""
    ids = torch.arange(first, first + logits.shape[1], device=logits.device)
    allowed = (bits[:, (ids >> 5) - first_word] >> (ids & 31).to(torch.int32)) & 1 > 0
    rows = places.to(torch.int64)
    logits[rows] = logits[rows].masked_fill(~allowed, -torch.inf)
