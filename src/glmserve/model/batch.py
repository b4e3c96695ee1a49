# SPDX-License-Identifier: Apache-2.0
"""`StepBatch`: the packed rows of one forward pass, and where their cache rows lie.

Not its job: which rows run (the scheduler's) or what the caches hold (`caches`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from glmserve.kernels.slot_lookup import slot_lookup
from glmserve.kernels.take_rows import take_rows


class DenseRows(NamedTuple):
    """Adjacent rows of one sequence that are known to see everything up to themselves, and few
    enough that the index would keep it all: a prefill chunk at a prompt's start."""

    first: int  # row of the batch
    rows: int
    context: int  # positions that the last of them sees
    line: int  # of the page table


@dataclass(frozen=True)
class StepBatch:
    """R rows; rows of one sequence are adjacent and ascending in position.

    A page-table line must cover every position that a pass touches: its rows' positions, and one
    more for an MTP pass (the entry of position i lies in the slot of i + 1).

    The host knows bounds only: lengths are read by the kernels, on the device. Two batches with
    the same shapes and the same host fields launch the same kernels with the same arguments, so a
    captured pass can be replayed with other contents.
    """

    tokens: Tensor  # [R] int64
    positions: Tensor  # [R] int64, position in the sequence less `ahead`
    row_seq: Tensor  # [R] int64, the row's line of the page table
    page_table: Tensor  # [S, P] int32, physical page of logical page p of sequence s
    page_size: int = 64
    ahead: int = 0  # draft passes since `positions`: each one moves every row on by one
    # No row sees more positions than this. None: on CPU the furthest row tells, on CUDA (where
    # asking would wait for the device) a page-table line does.
    max_context: int | None = None
    # Every sequence of the batch has exactly so many adjacent rows; None where they differ.
    rows_per_sequence: int | None = None
    # Rows that may attend densely; their chunks ascend. The host's knowledge, so not for batches
    # that are captured.
    dense: tuple[DenseRows, ...] = ()

    def select(self, rows: Tensor) -> StepBatch:
        """The batch of some rows, by index [N] int64."""
        return replace(
            self,
            tokens=take_rows(self.tokens, rows),
            positions=take_rows(self.positions, rows),
            row_seq=take_rows(self.row_seq, rows),
            rows_per_sequence=None,
            dense=(),
        )

    def advance(self) -> StepBatch:
        """The same rows one position later, for the next draft pass (which reads no tokens)."""
        bound = None if self.max_context is None else self.max_context + 1
        return replace(self, ahead=self.ahead + 1, max_context=bound, dense=())

    def slots(self, positions: Tensor) -> Tensor:
        """Physical cache rows [R, k] of each row's sequence at `positions` [R, k]; -1 stays -1."""
        return slot_lookup(positions, self.page_table, self.row_seq, self.page_size)

    def context_bound(self, shift: int) -> int:
        """Cache coordinates, in whole pages, that hold all that any row sees; rows' entries lie
        `shift` coordinates after their positions."""
        line = self.page_table.shape[1] * self.page_size
        seen = self.max_context
        if seen is None:
            if self.positions.is_cuda:
                return line
            seen = int(self.positions.max()) + self.ahead + 1
        return min(line, -(-(seen + shift) // self.page_size) * self.page_size)

    def __post_init__(self) -> None:
        rows = self.tokens.shape
        assert self.positions.shape == rows, (self.positions.shape, rows)
        assert self.row_seq.shape == rows, (self.row_seq.shape, rows)
        assert self.page_table.dtype == torch.int32, self.page_table.dtype
