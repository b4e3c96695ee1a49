# SPDX-License-Identifier: Apache-2.0
"""Rows of activations to fp8, one scale for each 128 columns: the input of block-fp8 products.

Fused forms live with the operators that they follow (`swiglu`, `residual_norm`).
"""

from __future__ import annotations

import torch

from . import reference
from .reference import GROUP, QuantRows, dequantise

__all__ = ["GROUP", "QuantRows", "dequantise", "quantise"]


def quantise(x: torch.Tensor) -> QuantRows:
    """[R, K], K a multiple of 128 -> values [R, K] e4m3 and scales [K / 128, R] fp32."""
    assert x.dim() == 2, x.shape
    assert x.shape[1] % GROUP == 0, x.shape
    if x.is_cuda:
        from . import launch

        return launch.quantise(x.contiguous())
    return reference.quantise(x)
