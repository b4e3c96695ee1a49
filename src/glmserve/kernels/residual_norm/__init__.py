# SPDX-License-Identifier: Apache-2.0
"""RMSNorm, alone and behind the residual addition of a layer boundary."""

from __future__ import annotations

import torch

from . import reference


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; [R, D] -> [R, D], x's dtype."""
    assert x.shape[-1] == weight.shape[0], (x.shape, weight.shape)
    assert x.dtype == weight.dtype, (x.shape, weight.shape)
    return reference.rms_norm(x, weight, eps)


def residual_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual), both [R, D] in residual's dtype.

    x may be wider than the residual (an unrounded sum); the addition is done in acc and rounded
    once, and the norm is that of the rounded sum, which is what the next boundary adds to.
    """
    assert x.shape == residual.shape, (x.shape, residual.shape)
    assert residual.shape[-1] == weight.shape[0]
    assert residual.dtype == weight.dtype
    return reference.residual_rms_norm(x, residual, weight, eps)
