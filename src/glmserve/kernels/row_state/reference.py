# SPDX-License-Identifier: Apache-2.0
"""The row state's operations in plain torch."""

from __future__ import annotations

import torch

from . import columns as c


def put_rows(x: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> None:
    x[index] = rows


def place_rows(
    table: torch.Tensor,
    sequences: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    row_seq: torch.Tensor,
    next_positions: torch.Tensor,
    ahead: torch.Tensor,
) -> None:
    drafts = ahead.shape[1]
    decoding = sequences[(sequences[:, c.PROMPT_END] < 0) & (sequences[:, c.FIRST_ROW] >= 0)]
    rows = decoding[:, c.ROW]
    lines = table[rows]
    live = lines[:, c.ACTIVE, None] == 1
    j = torch.arange(drafts + 1, device=rows.device)
    at = decoding[:, c.FIRST_ROW, None] + j
    guesses = lines[:, c.DRAFTS : c.DRAFTS + drafts]
    known = torch.cat([lines[:, c.LAST_TOKEN, None], guesses], dim=1)
    tokens[at] = torch.where(live, known, 0)
    positions[at] = torch.where(live, lines[:, c.LENGTH, None] - 1, 0) + j
    next_positions[at] = positions[at] + 1
    padding = len(table) - 1
    row_seq[at] = torch.where(live, rows[:, None], padding).expand(-1, drafts + 1)
    before = j[None, :drafts] < j[:, None]  # [places, k]
    draw = decoding[:, c.FIRST_DRAW, None] + j
    ahead[draw] = torch.where(live[..., None] & before, guesses[:, None], -1)


def verify_rows(
    table: torch.Tensor,
    sequences: torch.Tensor,
    draws: torch.Tensor,
    drafts: int,
    following: torch.Tensor,
    last: torch.Tensor,
    results: torch.Tensor,
) -> None:
    rows, first, ends = (sequences[:, i] for i in (c.ROW, c.FIRST_ROW, c.PROMPT_END))
    there, final = first >= 0, ends >= 0
    lines = table[rows]
    live = there & (final | (lines[:, c.ACTIVE] == 1)) & (rows < len(table) - 1)
    j = torch.arange(drafts + 1, device=rows.device)
    drawn_at = there[:, None] & (~final[:, None] | (j == 0))
    index = sequences[:, c.FIRST_DRAW, None] + j
    drawn = torch.where(drawn_at, draws[torch.where(drawn_at, index, 0)], -1)  # -1: no token
    following[(first[:, None] + j)[drawn_at]] = drawn[drawn_at]
    guesses = torch.where(final[:, None], -2, lines[:, c.DRAFTS : c.DRAFTS + drafts])
    accepted = (drawn[:, :-1] == guesses).to(torch.int64).cumprod(dim=1).sum(dim=1)
    stops = lines[:, c.STOPS : c.STOPS + c.MAX_STOPS]
    is_stop = ((drawn[:, :, None] == stops[:, None, :]) & drawn_at[:, :, None]).any(dim=2)
    before_stop = (~is_stop).to(torch.int64).cumprod(dim=1).sum(dim=1)  # draws ahead of a stop
    remaining = lines[:, c.REMAINING]
    count = torch.minimum(torch.minimum(accepted, before_stop) + 1, remaining)
    stopped = before_stop < count
    exhausted = (count == remaining) & ~stopped
    length = torch.where(final, ends, lines[:, c.LENGTH])

    alive, end = rows[live], (count - 1).clamp(min=0)
    table[alive, c.LENGTH] = (length + count)[live]
    table[alive, c.LAST_TOKEN] = drawn.gather(1, end[:, None])[live, 0]
    table[alive, c.REMAINING] = (remaining - count)[live]
    table[alive, c.ACTIVE] = (~(stopped | exhausted))[live].to(torch.int64)
    last[:] = first.clamp(min=0) + torch.where(live, end, 0)
    results[:, c.COUNT] = torch.where(live, count, 0).to(torch.int32)
    flags = stopped.to(torch.int32) * c.STOPPED + exhausted.to(torch.int32) * c.EXHAUSTED
    results[:, c.FLAGS] = torch.where(live, flags, 0)
    results[:, c.TOKENS : c.TOKENS + drafts + 1] = drawn.to(torch.int32)


def store_drafts(
    table: torch.Tensor,
    sequences: torch.Tensor,
    tokens: torch.Tensor,
    number: int,
    drafts: int,
    results: torch.Tensor,
) -> None:
    table[sequences[:, c.ROW], c.DRAFTS + number] = tokens
    results[:, c.TOKENS + drafts + 1 + number] = tokens.to(torch.int32)


def send_results(results: torch.Tensor, slots: torch.Tensor, sent: torch.Tensor) -> None:
    number = int(sent)
    slot = slots[number % len(slots)]
    slot[0] = number + 1
    slot[c.SLOT_HEAD : c.SLOT_HEAD + results.numel()] = results.flatten()
    sent[:] = number + 1


def keep_page_ends(
    hidden: torch.Tensor,
    positions: torch.Tensor,
    row_seq: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    page_hidden: torch.Tensor,
) -> None:
    ends = positions % page_size == page_size - 1
    pages = page_table[row_seq[ends], positions[ends] // page_size].long()
    page_hidden[pages] = hidden[ends]
