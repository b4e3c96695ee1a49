# SPDX-License-Identifier: Apache-2.0
"""s = residual + (p_0 + p_1 + ...), summed in rank order in acc, rounded once; and its RMSNorm."""

from __future__ import annotations

import torch

from ..precision import acc_dtype
from ..residual_norm.reference import residual_rms_norm


def boundary(
    partials: list[torch.Tensor],
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    acc = acc_dtype(weight.dtype)
    total = partials[0].to(acc)
    for partial in partials[1:]:
        total = total + partial.to(acc)
    return residual_rms_norm(total, residual, weight, eps)
