# SPDX-License-Identifier: Apache-2.0
"""angle(p), p + shift, slot(p + shift)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..rope.reference import rope_table
from ..slot_lookup.reference import slot_lookup


class StepInputs(NamedTuple):
    rope: torch.Tensor  # [R, rope / 2, 2] acc, (cos, sin) of the RoPE positions
    last: torch.Tensor  # [R] int64, cache coordinate of the row itself: the last that it sees
    own_slots: torch.Tensor  # [R] int64 (int32 from the kernel), where the row's entry is written


def step_inputs(
    positions: torch.Tensor,
    row_seq: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    ahead: int,
    shift: int,
    rope_dim: int,
    theta: float,
    dtype: torch.dtype,
) -> StepInputs:
    place = positions + ahead
    last = place + shift
    slots = slot_lookup(last[:, None], page_table, row_seq, page_size)[:, 0]
    return StepInputs(rope_table(place, rope_dim, theta, dtype), last, slots)
