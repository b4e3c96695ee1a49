# SPDX-License-Identifier: Apache-2.0
"""RMSNorm: statistics and the product with the weight in acc, one cast at the end."""

from __future__ import annotations

import torch

from ..precision import acc_dtype


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    acc = acc_dtype(x.dtype)
    wide = x.to(acc)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.to(acc)).to(x.dtype)


def residual_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    acc = acc_dtype(weight.dtype)
    wide = x.to(acc)
    total = (wide if residual is None else wide + residual.to(acc)).to(weight.dtype)
    return rms_norm(total, weight, eps), total
