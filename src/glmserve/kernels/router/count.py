# SPDX-License-Identifier: Apache-2.0
"""Counts how often each expert is chosen, beside the choice itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ChoiceCount:
    """Where a pass's choices are counted. Rows whose `row_seq` is `padding` are not."""

    totals: torch.Tensor  # [E] int64, only grows
    row_seq: torch.Tensor  # [R] int64
    padding: int

    def add(self, ids: torch.Tensor) -> None:
        """Counts the choices ids [R, k] int64, without a kernel of ours."""
        real = ids[self.row_seq != self.padding].flatten()
        self.totals.add_(torch.bincount(real, minlength=len(self.totals)))
