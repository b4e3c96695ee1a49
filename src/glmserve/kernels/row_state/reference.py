# SPDX-License-Identifier: Apache-2.0
"""The row state's operations in plain torch."""

from __future__ import annotations

import torch

from . import columns as c


def put_rows(x: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> None:
    x[index] = rows


def place_rows(
    table: torch.Tensor,
    rows: torch.Tensor,
    drafts: int,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    row_seq: torch.Tensor,
    ahead: torch.Tensor,
) -> None:
    places = drafts + 1
    count = len(rows) * places
    lines = table[rows]
    live = lines[:, c.ACTIVE, None] == 1
    j = torch.arange(places, device=rows.device)
    guesses = lines[:, c.DRAFTS : c.DRAFTS + drafts]
    known = torch.cat([lines[:, c.LAST_TOKEN, None], guesses], dim=1)
    tokens[:count] = torch.where(live, known, 0).flatten()
    start = torch.where(live, lines[:, c.LENGTH, None] - 1, 0)
    positions[:count] = (start + j).flatten()
    padding = len(table) - 1
    row_seq[:count] = torch.where(live, rows[:, None], padding).expand(-1, places).flatten()
    before = j[None, :drafts] < j[:, None]  # [places, k]
    ahead[:count] = torch.where(live[..., None] & before, guesses[:, None], -1).flatten(0, 1)


def verify_rows(
    table: torch.Tensor,
    rows: torch.Tensor,
    draws: torch.Tensor,
    drafts: int,
    prompt_ends: torch.Tensor,
    final_index: torch.Tensor,
    following: torch.Tensor,
    last: torch.Tensor,
    results: torch.Tensor,
) -> None:
    places, finals = drafts + 1, len(final_index)
    sequences = len(rows)
    decoding = sequences - finals
    split = decoding * places
    following[:split] = draws[:split]
    following[final_index] = draws[split:]
    lines = table[rows]
    drawn = draws.new_full((sequences, places), -1)  # -1 is no token: equal to no draft
    drawn[:decoding] = draws[:split].view(decoding, places)
    drawn[decoding:, 0] = draws[split:]
    live = lines[:, c.ACTIVE] == 1
    live[decoding:] = True
    guesses = lines[:, c.DRAFTS : c.DRAFTS + drafts].clone()
    guesses[decoding:] = -2
    accepted = (drawn[:, :-1] == guesses).to(torch.int64).cumprod(dim=1).sum(dim=1)
    stops = lines[:, c.STOPS : c.STOPS + c.MAX_STOPS]
    is_stop = ((drawn[:, :, None] == stops[:, None, :]) & (drawn >= 0)[:, :, None]).any(dim=2)
    before_stop = (~is_stop).to(torch.int64).cumprod(dim=1).sum(dim=1)  # draws ahead of a stop
    remaining = lines[:, c.REMAINING]
    count = torch.minimum(torch.minimum(accepted, before_stop) + 1, remaining)
    stopped = before_stop < count
    exhausted = (count == remaining) & ~stopped
    length = lines[:, c.LENGTH].clone()
    length[decoding:] = prompt_ends

    alive, told = rows[live], torch.where(live, count, 0)
    end = (count - 1).clamp(min=0)
    table[alive, c.LENGTH] = (length + count)[live]
    table[alive, c.LAST_TOKEN] = drawn.gather(1, end[:, None])[live, 0]
    table[alive, c.REMAINING] = (remaining - count)[live]
    table[alive, c.ACTIVE] = (~(stopped | exhausted))[live].to(torch.int64)
    last[:decoding] = torch.arange(decoding, device=rows.device) * places
    last[:decoding] += torch.where(live, end, 0)[:decoding]
    last[decoding:] = final_index
    results[:, c.COUNT] = told.to(torch.int32)
    flags = stopped.to(torch.int32) * c.STOPPED + exhausted.to(torch.int32) * c.EXHAUSTED
    results[:, c.FLAGS] = torch.where(live, flags, 0)
    results[:, c.TOKENS : c.TOKENS + places] = drawn.to(torch.int32)


def store_drafts(
    table: torch.Tensor,
    rows: torch.Tensor,
    tokens: torch.Tensor,
    number: int,
    drafts: int,
    results: torch.Tensor,
) -> None:
    table[rows, c.DRAFTS + number] = tokens
    results[:, c.TOKENS + drafts + 1 + number] = tokens.to(torch.int32)


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
