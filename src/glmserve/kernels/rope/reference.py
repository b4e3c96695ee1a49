# SPDX-License-Identifier: Apache-2.0
"""RoPE over interleaved pairs (2i, 2i+1), angle p * theta^(-2i / d); pair order is kept."""

from __future__ import annotations

import torch

from ..precision import acc_dtype


def rope_table(
    positions: torch.Tensor, rope_dim: int, theta: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    acc = acc_dtype(dtype)
    pair = torch.arange(0, rope_dim, 2, dtype=acc, device=positions.device)
    angle = positions.to(acc)[:, None] / theta ** (pair / rope_dim)
    return angle.cos(), angle.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the last dimension of x [R, ..., d] by row; computes and returns acc(x.dtype)."""
    even, odd = x.to(cos.dtype).view(*x.shape[:-1], -1, 2).unbind(-1)
    shape = (x.shape[0], *[1] * (x.dim() - 2), -1)
    cos, sin = cos.view(shape), sin.view(shape)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
