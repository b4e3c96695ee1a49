# SPDX-License-Identifier: Apache-2.0
"""Packs a plan into rows of one forward pass of a known shape.

First come `drafts + 1` places for each of B decoding sequences (B is the plan's count rounded up
to a bucket; the device fills the places from the row state), then the rows of the prefill chunks.
Rows of one sequence are adjacent and ascending in position. Which rows have ended meanwhile, and
which drafts are accepted, only the device knows: nothing here depends on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from glmserve.config import PAGE_SIZE
from glmserve.kernels.row_state import place_rows
from glmserve.kernels.take_rows import take_rows
from glmserve.messages import PrefillChunk, StepPlan
from glmserve.model.batch import StepBatch
from glmserve.runtime.row_state import RowState
from glmserve.runtime.uploads import upload

_LAST_DOUBLING = 128
_BUCKET_STEP = 64


def bucket_of(rows: int) -> int:
    """Decoding sequences that a step computes for `rows` of them: 0, 1, 2, 4 .. 128, 192, 256 .."""
    if rows > _LAST_DOUBLING:
        return -(-rows // _BUCKET_STEP) * _BUCKET_STEP
    return 1 << (rows - 1).bit_length() if rows else 0


def buckets(max_rows: int) -> list[int]:
    """Every bucket that plans of up to `max_rows` sequences fall into, ascending."""
    return sorted({bucket_of(rows) for rows in range(1, max_rows + 1)})


@dataclass(frozen=True)
class Layout:
    """A step's rows on the device. Two layouts of the same shape run the same kernels."""

    batch: StepBatch
    ahead: Tensor  # [B (k + 1), k] drafts of the step ahead of each decoding place, padded with -1
    following: Tensor  # [R] the token after each row's; draws are filled in
    rows: Tensor  # [S] device rows that draw: B decoding ones, then those whose prompts end here
    decoding: int  # B
    prompt_ends: Tensor  # [F] lengths of the prompts that end
    final_index: Tensor  # [F] their last rows' numbers
    drawing: Tensor | None  # [M] numbers of the rows that are drawn from; None = all of them

    @property
    def sequences(self) -> int:
        return len(self.rows)

    def drawn(self, x: Tensor) -> Tensor:
        """The lines of x [R, ...] that belong to drawing rows: [M, ...]."""
        return x if self.drawing is None else take_rows(x, self.drawing)

    def drawn_ahead(self) -> Tensor:
        """[M, k] as `ahead`, for all drawing rows."""
        finals = len(self.final_index)
        if not finals:
            return self.ahead
        return torch.cat([self.ahead, self.ahead.new_full((finals, self.ahead.shape[1]), -1)])

    def place(self, state: RowState) -> None:
        """Fills the decoding places from the row state."""
        place_rows(
            state.table,
            self.rows[: self.decoding],
            state.drafts,
            self.batch.tokens,
            self.batch.positions,
            self.batch.row_seq,
            self.ahead,
        )


@dataclass(frozen=True)
class Places:
    """The host's view of the same step: whose the drawing rows are."""

    decode: tuple[int, ...]  # device rows in the plan's order; padding follows
    finals: tuple[int, ...]
    bucket: int
    width: int  # k + 1
    prefill_rows: int

    @classmethod
    def of(cls, plan: StepPlan, drafts: int) -> Places:
        return cls(
            plan.decode,
            tuple(chunk.row for chunk in plan.prefill if chunk.final),
            bucket_of(len(plan.decode)),
            drafts + 1,
            sum(chunk.length for chunk in plan.prefill),
        )

    def by_row(self) -> dict[int, tuple[int, int]]:
        """Device row -> (its first drawing row, how many)."""
        found = {row: (i * self.width, self.width) for i, row in enumerate(self.decode)}
        first = self.bucket * self.width
        return found | {row: (first + i, 1) for i, row in enumerate(self.finals)}


def decode_layout(rows: Tensor, state: RowState) -> Layout:
    """The layout of a step that only decodes `rows` [B]; its contents follow from `place`."""
    places = len(rows) * (state.drafts + 1)

    def column(count: int = places) -> Tensor:
        return torch.empty(count, dtype=torch.int64, device=rows.device)

    return Layout(
        StepBatch(
            column(),
            column(),
            column(),
            state.page_table,
            PAGE_SIZE,
            rows_per_sequence=state.drafts + 1,
        ),
        torch.empty(places, state.drafts, dtype=torch.int64, device=rows.device),
        column(),
        rows,
        len(rows),
        column(0),
        column(0),
        None,
    )


def padded_rows(
    decode: Sequence[int], bucket: int, padding: int
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    rows = np.full(bucket, padding, dtype=np.int64)
    rows[: len(decode)] = decode
    return rows


def pack(plan: StepPlan, places: Places, state: RowState, max_context: int | None) -> Layout:
    """The layout of a plan with prefill chunks; `max_context` bounds what its rows see."""
    head = places.bucket * places.width
    total = head + places.prefill_rows
    tokens, positions, row_seq, following = np.zeros((4, total), dtype=np.int64)
    at, ends, final_index = head, [], []
    for chunk in plan.prefill:
        to = at + chunk.length
        tokens[at:to] = chunk.tokens[: chunk.length]
        positions[at:to] = np.arange(chunk.start, chunk.start + chunk.length)
        row_seq[at:to] = chunk.row
        after = chunk.tokens[1 : chunk.length + 1]  # the token after a prompt's last one is drawn
        following[at : at + len(after)] = after
        if chunk.final:
            ends.append(chunk.start + chunk.length)
            final_index.append(to - 1)
        at = to
    rows = padded_rows(places.decode, places.bucket, state.padding)
    sent = upload(
        [
            tokens,
            positions,
            row_seq,
            following,
            np.concatenate([rows, np.array(places.finals, dtype=np.int64)]),
            np.array(ends, dtype=np.int64),
            np.array(final_index, dtype=np.int64),
            np.concatenate([np.arange(head), np.array(final_index, dtype=np.int64)]),
        ],
        state.device,
    )
    batch = StepBatch(*sent[:3], state.page_table, PAGE_SIZE, max_context=max_context)
    ahead = torch.empty(head, state.drafts, dtype=torch.int64, device=state.device)
    return Layout(batch, ahead, sent[3], sent[4], places.bucket, sent[5], sent[6], sent[7])


def resumed_batch(
    chunks: Sequence[PrefillChunk], state: RowState
) -> tuple[StepBatch, Tensor, Tensor] | None:
    """The MTP rows that prefix hits lack: (batch [Q], tokens after them [Q], their logical pages
    [Q, 1]); None without hits.

    The entry of position i lies in slot i + 1, so the first slot after a hit needs the hidden
    state of the hit's last position.
    """
    hits = [chunk for chunk in chunks if chunk.resumed]
    if not hits:
        return None
    positions = np.array([chunk.start - 1 for chunk in hits], dtype=np.int64)
    rows = np.array([chunk.row for chunk in hits], dtype=np.int64)
    tokens = np.array([chunk.tokens[0] for chunk in hits], dtype=np.int64)
    sent = upload([positions, rows, tokens, positions[:, None] // PAGE_SIZE], state.device)
    batch = StepBatch(
        sent[2],
        sent[0],
        sent[1],
        state.page_table,
        PAGE_SIZE,
        max_context=int(positions.max()) + 1,
        rows_per_sequence=1,
    )
    return batch, sent[2], sent[3]
