# SPDX-License-Identifier: Apache-2.0
"""Packs a plan into rows of one forward pass.

First `drafts + 1` rows for each decoding sequence (its last token and its drafts), then the rows
of the prefill chunks. Rows of one sequence are adjacent and ascending in position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from glmserve.messages import PrefillChunk, StepPlan
from glmserve.model.batch import StepBatch
from glmserve.runtime.row_state import RowState


@dataclass(frozen=True)
class Layout:
    """Where things are among the packed rows of a step."""

    batch: StepBatch
    following: Tensor  # [R] the token after each row's, where the plan knows it, else -1
    sampled: Tensor  # [N] sequences (device rows) that draw: decoding ones, then final prefills
    decoding: int  # how many of `sampled` decode
    first: Tensor  # [N] packed index of each sampled sequence's first drawing row
    width: Tensor  # [N] drawing rows: drafts + 1, or 1 for a prefill
    resumed: list[tuple[int, PrefillChunk]]  # prefix hits, by packed index of their first row


def pack(plan: StepPlan, state: RowState) -> Layout | None:
    """Returns the layout, or None when every row of the plan has ended meanwhile."""
    device = state.length.device
    planned = torch.tensor(plan.decode, dtype=torch.int64, device=device)
    decoding = planned[state.active[planned]]
    steps = torch.arange(state.drafts.shape[1] + 1, device=device)
    tokens = [torch.cat([state.last_token[decoding, None], state.drafts[decoding]], 1).flatten()]
    positions = [(state.length[decoding, None] - 1 + steps).flatten()]
    rows = [decoding.repeat_interleave(len(steps))]
    following = [torch.full_like(tokens[0], -1)]
    sampled = [decoding]
    first = [torch.arange(len(decoding), device=device) * len(steps)]
    width = [torch.full_like(decoding, len(steps))]
    packed = len(tokens[0])
    resumed = []
    for chunk in plan.prefill:
        ids = torch.from_numpy(chunk.tokens).to(device, torch.int64)
        tokens.append(ids[: chunk.length])
        positions.append(torch.arange(chunk.start, chunk.start + chunk.length, device=device))
        rows.append(torch.full((chunk.length,), chunk.row, dtype=torch.int64, device=device))
        # The token after the prompt's last one is drawn.
        following += [ids[1:], ids.new_full((int(chunk.final),), -1)]
        if chunk.resumed:
            resumed.append((packed, chunk))
        packed += chunk.length
        if chunk.final:
            state.length[chunk.row] = chunk.start + chunk.length
            sampled.append(torch.tensor([chunk.row], device=device))
            first.append(torch.tensor([packed - 1], device=device))
            width.append(torch.tensor([1], device=device))
    if packed == 0:
        return None
    batch = StepBatch(torch.cat(tokens), torch.cat(positions), torch.cat(rows), state.page_table)
    return Layout(
        batch,
        torch.cat(following),
        torch.cat(sampled),
        len(decoding),
        torch.cat(first),
        torch.cat(width),
        resumed,
    )
