# SPDX-License-Identifier: Apache-2.0
"""What every layer of a pass reads of its rows' positions: angles, what they see, their slots."""

from __future__ import annotations

import torch

from ..dispatch import use_kernel
from . import reference
from .reference import StepInputs

__all__ = ["StepInputs", "step_inputs"]


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
    """For rows at p = positions + ahead: the rotary table of p in acc(dtype), the cache
    coordinate p + shift, and the physical slot of that coordinate.

    positions [R] int64, row_seq [R] int64 the row's line of page_table [S, P] int32
    """
    assert positions.dim() == 1, positions.shape
    assert row_seq.shape == positions.shape, (row_seq.shape, positions.shape)
    assert rope_dim % 2 == 0, rope_dim
    if positions.is_cuda:
        from . import kernel

        if use_kernel("step_inputs", "cuda", kernel.unserved(rope_dim, page_size, dtype)):
            return kernel.step_inputs(
                positions, row_seq, page_table, page_size, ahead, shift, rope_dim, theta
            )
    return reference.step_inputs(
        positions, row_seq, page_table, page_size, ahead, shift, rope_dim, theta, dtype
    )
