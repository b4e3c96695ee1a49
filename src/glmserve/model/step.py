# SPDX-License-Identifier: Apache-2.0
"""What all layers of one pass share: rotary angles, the rows' own slots, what each row may see.

A pass works in cache coordinates. The target's entry of position p lies at p; the MTP layer's lies
at p + 1 while its RoPE position stays p, so its coordinates are shifted and 0 is never used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from glmserve.kernels.step_inputs import step_inputs
from glmserve.kernels.take_rows import take_rows
from glmserve.model.batch import StepBatch
from glmserve.model_config import ModelConfig


@dataclass(frozen=True)
class Selection:
    """An index group's result, shared by its layers.

    Positions are cache coordinates (see above), ascending, padded with -1 at the end; k is
    min(index_topk, the batch's bound on contexts in whole pages).
    """

    positions: Tensor  # [R, k] int32
    slots: Tensor  # [R, k] int64 (int32 on CUDA), physical rows of the same entries, -1 unused

    def select(self, rows: Tensor) -> Selection:
        """The selections of some rows, by index [N] int64."""
        return Selection(take_rows(self.positions, rows), take_rows(self.slots, rows))


@dataclass(frozen=True)
class Step:
    """One pass over a batch's R rows as every layer sees it."""

    batch: StepBatch
    rope: Tensor  # [R, rope / 2, 2] acc, (cos, sin) of the RoPE positions
    last: Tensor  # [R] int64, cache coordinate of the row itself: the last that it sees
    first: int  # the first cache coordinate in use
    own_slots: Tensor  # [R] int64 (int32 on CUDA), where the row's entry is written
    max_context: int  # cache coordinates that scores are made for, whole pages

    @classmethod
    def of(cls, batch: StepBatch, config: ModelConfig, dtype: torch.dtype, shift: int) -> Step:
        """`shift` is 0 for the target, 1 for the MTP layer."""
        rope, last, slots = step_inputs(
            batch.positions,
            batch.row_seq,
            batch.page_table,
            batch.page_size,
            batch.ahead,
            shift,
            config.qk_rope_head_dim,
            config.rope_theta,
            dtype,
        )
        return cls(batch, rope, last, shift, slots, batch.context_bound(shift))
