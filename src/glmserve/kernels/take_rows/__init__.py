# SPDX-License-Identifier: Apache-2.0
"""Rows of a tensor by numbers that only the device knows: x[index]."""

from __future__ import annotations

import torch

from ..dispatch import use_kernel


def take_rows(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """x [R, ...] of any dtype, index [N] int64 in 0..R-1 -> [N, ...], a copy of those rows."""
    assert index.dim() == 1, index.shape
    assert not index.is_floating_point(), index.dtype
    if x.is_cuda:
        from . import kernel

        if use_kernel("take_rows", "cuda", kernel.unserved(x)):
            return kernel.take_rows(x, index)
    return x[index]
