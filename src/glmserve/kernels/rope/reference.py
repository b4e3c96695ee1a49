# SPDX-License-Identifier: Apache-2.0
"""RoPE over interleaved pairs (2i, 2i+1), angle p * theta^(-2i / d); pair order is kept."""

from __future__ import annotations

import torch

from ..precision import acc_dtype


def rope_table(
    positions: torch.Tensor, rope_dim: int, theta: float, dtype: torch.dtype
) -> torch.Tensor:
    acc = acc_dtype(dtype)
    pair = torch.arange(0, rope_dim, 2, dtype=acc, device=positions.device)
    angle = positions.to(acc)[:, None] / theta ** (pair / rope_dim)
    return torch.stack((angle.cos(), angle.sin()), -1)


def rotate(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Turns the pairs of x [R, ..., d] by the row's angles: (a + ib) * (cos + i sin).

    Computes and returns acc(x.dtype).
    """
    pairs = x.to(rope.dtype).reshape(*x.shape[:-1], -1, 2).contiguous()
    turn = torch.view_as_complex(rope).view(x.shape[0], *[1] * (x.dim() - 2), -1)
    return torch.view_as_real(torch.view_as_complex(pairs) * turn).flatten(-2)
