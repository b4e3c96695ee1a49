# SPDX-License-Identifier: Apache-2.0
"""Rotary angles of a step, computed once and read by every layer (pairs, plain theta)."""

from __future__ import annotations

import torch

from ..dispatch import use_kernel
from . import reference


def rope_table(
    positions: torch.Tensor, rope_dim: int, theta: float, dtype: torch.dtype
) -> torch.Tensor:
    """[R, rope_dim / 2, 2] = (cos, sin) in acc(dtype) of integer `positions` [R]."""
    assert positions.dim() == 1, positions.shape
    assert not positions.is_floating_point(), positions.shape
    assert rope_dim % 2 == 0, rope_dim
    if positions.is_cuda:
        from . import kernel

        if use_kernel("rope_table", "cuda", kernel.unserved(rope_dim, dtype)):
            return kernel.rope_table(positions, rope_dim, theta)
    return reference.rope_table(positions, rope_dim, theta, dtype)
