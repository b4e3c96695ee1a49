# SPDX-License-Identifier: Apache-2.0
"""Packs a plan into rows of one forward pass of a known shape.

First come `drafts + 1` places for each decoding sequence, which the device fills from the row
state, then the rows of the prefill chunks, then padding up to a shape that a graph was captured
for. Rows of one sequence are adjacent and ascending in position. Which rows have ended meanwhile,
and which drafts are accepted, only the device knows: nothing here depends on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from glmserve.config import PAGE_SIZE
from glmserve.kernels.row_state import columns, place_rows
from glmserve.kernels.take_rows import take_rows
from glmserve.messages import IntArray, PrefillChunk, StepPlan
from glmserve.model.batch import DenseRows, StepBatch
from glmserve.runtime.row_state import RowState
from glmserve.runtime.uploads import Upload, upload

_LAST_DOUBLING = 128
_BUCKET_STEP = 64
# Rows of captured steps with prefill chunks; larger steps are eager.
MIXED_ROWS = (64, 128, 256, 512)


def bucket_of(rows: int) -> int:
    """Decoding sequences that a step computes for `rows` of them: 1, 2, 4 .. 128, 192, 256 .."""
    if rows > _LAST_DOUBLING:
        return -(-rows // _BUCKET_STEP) * _BUCKET_STEP
    return 1 << (rows - 1).bit_length()


def buckets(max_rows: int) -> list[int]:
    """Every bucket that plans of up to `max_rows` sequences fall into, ascending."""
    return sorted({bucket_of(rows) for rows in range(1, max_rows + 1)})


@dataclass(frozen=True)
class Shape:
    """What a step is padded to. `mixed`: it has room for prefill rows, and every row is drawn
    from; else all its rows are places of decoding sequences."""

    rows: int
    sequences: int
    mixed: bool


@dataclass(frozen=True)
class Places:
    """The host's view of a step: whose the drawing rows are."""

    decode: tuple[int, ...]  # device rows in the plan's order
    finals: tuple[int, ...]  # device rows whose prompts end
    first: tuple[int, ...]  # each one's first drawing row, decoding ones first
    width: int  # k + 1
    prefill_rows: int
    shape: Shape | None  # None: as large as it is

    @classmethod
    def of(cls, plan: StepPlan, drafts: int, shape: Shape | None) -> Places:
        width = drafts + 1
        first = [i * width for i in range(len(plan.decode))]
        at = len(plan.decode) * width
        finals: list[int] = []
        for chunk in plan.prefill:
            at += chunk.length
            if chunk.final:
                # Where every row is drawn from, the row itself; else they follow the decoding ones.
                first.append(at - 1 if shape else len(plan.decode) * width + len(finals))
                finals.append(chunk.row)
        prefill_rows = sum(chunk.length for chunk in plan.prefill)
        return cls(plan.decode, tuple(finals), tuple(first), width, prefill_rows, shape)

    @property
    def total(self) -> int:
        """Rows of the step."""
        return self.shape.rows if self.shape else len(self.decode) * self.width + self.prefill_rows

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """Device rows that draw."""
        return (*self.decode, *self.finals)

    @cached_property
    def drawing(self) -> IntArray:
        """The same as an array."""
        return np.array(self.rows, dtype=np.int32)

    def by_row(self) -> dict[int, tuple[int, int]]:
        """Device row -> (its first drawing row, how many)."""
        widths = [self.width] * len(self.decode) + [1] * len(self.finals)
        return dict(zip(self.rows, zip(self.first, widths, strict=True), strict=True))


@dataclass(frozen=True)
class Layout:
    """A step's rows on the device. Two layouts of the same shape run the same kernels."""

    batch: StepBatch
    following: Tensor  # [R] the token after each row's; draws are filled in
    next_positions: Tensor  # [R] positions + 1
    ahead: Tensor  # [M, k] drafts of the step ahead of each drawing row, padded with -1
    sequences: Tensor  # [S, columns.SEQUENCE_WIDTH] what draws
    drawing: Tensor | None  # [M] numbers of the rows that are drawn from; None = all of them
    source: Upload  # what all of these are views of

    @property
    def rows(self) -> Tensor:
        """[S] device rows (strided)."""
        return self.sequences[:, columns.ROW]

    def drawn(self, x: Tensor) -> Tensor:
        """The lines of x [R, ...] that belong to drawing rows: [M, ...]."""
        return x if self.drawing is None else take_rows(x, self.drawing)

    def place(self, state: RowState) -> None:
        """Fills the decoding places from the row state."""
        batch = self.batch
        place_rows(
            state.table,
            self.sequences,
            batch.tokens,
            batch.positions,
            batch.row_seq,
            self.next_positions,
            self.ahead,
        )


def pack(plan: StepPlan, places: Places, state: RowState, max_context: int | None) -> Layout:
    """The layout of a plan; `max_context` bounds what its rows see (None: see StepBatch)."""
    source = Upload(step_arrays(plan, places, state), state.device)
    rows, sequences, ahead, *drawing = source.tensors
    shape = places.shape
    tokens, positions, row_seq, following, next_positions = rows[:, : places.total].unbind(0)
    batch = StepBatch(
        tokens,
        positions,
        row_seq,
        state.page_table,
        PAGE_SIZE,
        max_context=max_context,
        rows_per_sequence=places.width if shape and not shape.mixed else None,
        dense=() if shape else _dense_rows(plan, places),
    )
    drawn = drawing[0] if drawing else None
    return Layout(batch, following, next_positions, ahead, sequences, drawn, source)


def _dense_rows(plan: StepPlan, places: Places) -> tuple[DenseRows, ...]:
    """Long prefill chunks, which the model attends densely if the index keeps all they see: those
    that no captured step has room for, so that a chunk's length alone decides on its bits."""
    found, at = [], len(places.decode) * places.width
    for chunk in plan.prefill:
        if chunk.length > MIXED_ROWS[-1]:
            found.append(DenseRows(at, chunk.length, chunk.start + chunk.length, chunk.row))
        at += chunk.length
    return tuple(found)


def step_arrays(plan: StepPlan, places: Places, state: RowState) -> list[npt.NDArray[Any]]:
    """What a step brings: rows [5, R] (tokens, positions, row_seq, following, next positions; one
    more where R is odd, so that each begins at a multiple of 16 bytes), sequences [S, ..], ahead
    [M, k], and without a shape the drawing rows [M]."""
    head, shape = len(places.decode) * places.width, places.shape
    rows = np.zeros((5, places.total + places.total % 2), dtype=np.int64)
    rows[2] = state.padding
    rows[4] = 1
    at, ends = head, []
    for chunk in plan.prefill:
        to = at + chunk.length
        rows[0, at:to] = chunk.tokens[: chunk.length]
        rows[1, at:to] = np.arange(chunk.start, chunk.start + chunk.length)
        rows[2, at:to] = chunk.row
        after = chunk.tokens[1 : chunk.length + 1]  # the token after a prompt's last one is drawn
        rows[3, at : at + len(after)] = after
        rows[4, at:to] = rows[1, at:to] + 1
        if chunk.final:
            ends.append((to - 1, chunk.start + chunk.length))
        at = to
    sequences = _sequences(places, ends, state.padding)
    if shape:
        return [rows, sequences, np.full((places.total, state.drafts), -1, dtype=np.int64)]
    drawing = np.array([*range(head), *(row for row, _ in ends)], dtype=np.int64)
    ahead = np.full((len(drawing), state.drafts), -1, dtype=np.int64)
    return [rows, sequences, ahead, drawing]


def _sequences(places: Places, ends: list[tuple[int, int]], padding: int) -> npt.NDArray[np.int64]:
    """ends: (row number, prompt length) of each prompt that ends."""
    shape, count = places.shape, len(places.first)
    lines = np.zeros((shape.sequences if shape else count, columns.SEQUENCE_WIDTH), dtype=np.int64)
    lines[:, columns.ROW] = padding
    lines[:, columns.FIRST_ROW] = -1
    lines[:, columns.PROMPT_END] = -1
    if shape and not shape.mixed:  # padding has places too: a decode step has no other rows
        starts = np.arange(shape.sequences) * places.width
        lines[:, columns.FIRST_ROW] = lines[:, columns.FIRST_DRAW] = starts
    lines[:count, columns.ROW] = places.rows
    lines[:count, columns.FIRST_ROW] = lines[:count, columns.FIRST_DRAW] = places.first
    decoding = len(places.decode)
    for line, (row, length) in zip(lines[decoding:], ends, strict=False):
        line[columns.FIRST_ROW], line[columns.PROMPT_END] = row, length
    return lines


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
