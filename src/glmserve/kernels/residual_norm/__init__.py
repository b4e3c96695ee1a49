# SPDX-License-Identifier: Apache-2.0
"""RMSNorm, alone and behind the residual addition of a layer boundary."""

from __future__ import annotations

import torch

from ..dispatch import use_kernel
from ..quantise.reference import GROUP, QuantRows, quantise
from . import reference


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; [R, D] -> [R, D], x's dtype."""
    assert x.shape[-1] == weight.shape[0], (x.shape, weight.shape)
    assert x.dtype == weight.dtype, (x.dtype, weight.dtype)
    if x.is_cuda:
        from . import launch

        if use_kernel("rms_norm", "cuda", launch.unserved(x.dtype, x.dtype)):
            return launch.residual_norm(x.contiguous(), None, weight, eps)[0]
    return reference.rms_norm(x, weight, eps)


def residual_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual), both [R, D] in residual's dtype.

    x may be wider than the residual (an unrounded sum); the addition is done in acc and rounded
    once, and the norm is that of the rounded sum, which is what the next boundary adds to.
    """
    _check(x, residual, weight)
    if x.is_cuda:
        from . import launch

        if use_kernel("residual_rms_norm", "cuda", launch.unserved(weight.dtype, x.dtype)):
            normed, total, _ = launch.residual_norm(
                x.contiguous(), residual.contiguous(), weight, eps
            )
            assert total is not None
            return normed, total
    return reference.residual_rms_norm(x, residual, weight, eps)


def residual_rms_norm_quantised(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, QuantRows]:
    """The same, and the normed rows in fp8 beside them; D a multiple of 128."""
    _check(x, residual, weight)
    assert x.shape[1] % GROUP == 0, x.shape
    if x.is_cuda:
        from . import launch

        if use_kernel("residual_rms_norm", "cuda", launch.unserved(weight.dtype, x.dtype)):
            normed, total, rows = launch.residual_norm(
                x.contiguous(), residual.contiguous(), weight, eps, quantised=True
            )
            assert total is not None
            assert rows is not None
            return normed, total, rows
    normed, total = reference.residual_rms_norm(x, residual, weight, eps)
    return normed, total, quantise(normed)


def _check(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> None:
    assert x.shape == residual.shape, (x.shape, residual.shape)
    assert residual.shape[-1] == weight.shape[0]
    assert residual.dtype == weight.dtype
