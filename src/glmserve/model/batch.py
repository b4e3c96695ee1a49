# SPDX-License-Identifier: Apache-2.0
"""`StepBatch`: the packed rows of one forward pass, and where their cache rows lie.

Not its job: which rows run (the scheduler's) or what the caches hold (`caches`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from glmserve.kernels.slot_lookup import slot_lookup


@dataclass(frozen=True)
class StepBatch:
    """R rows; rows of one sequence are adjacent and ascending in position.

    A page-table line must cover every position that a pass touches: its rows' positions, and one
    more for an MTP pass (the entry of position i lies in the slot of i + 1).
    """

    tokens: Tensor  # [R] int64
    positions: Tensor  # [R] int64, position in the sequence
    row_seq: Tensor  # [R] int64, the row's line of the page table
    page_table: Tensor  # [S, P] int32, physical page of logical page p of sequence s
    page_size: int = 64

    def select(self, rows: Tensor) -> StepBatch:
        """The batch of some rows, by index or boolean mask."""
        return replace(
            self,
            tokens=self.tokens[rows],
            positions=self.positions[rows],
            row_seq=self.row_seq[rows],
        )

    def advance(self) -> StepBatch:
        """The same rows one position later, for the next draft pass (which reads no tokens)."""
        return replace(self, positions=self.positions + 1)

    def slots(self, positions: Tensor) -> Tensor:
        """Physical cache rows [R, k] of each row's sequence at `positions` [R, k]; -1 stays -1."""
        return slot_lookup(positions, self.page_table, self.row_seq, self.page_size)

    @cached_property
    def max_context(self) -> int:
        """Positions that the furthest row sees, itself included."""
        return int(self.positions.max()) + 1

    def __post_init__(self) -> None:
        rows = self.tokens.shape
        assert self.positions.shape == rows, (self.positions.shape, rows)
        assert self.row_seq.shape == rows, (self.row_seq.shape, rows)
        assert self.page_table.dtype == torch.int32, self.page_table.dtype
