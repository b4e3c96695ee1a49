# SPDX-License-Identifier: Apache-2.0
"""Dense projections without bias, bf16 or block-fp8."""

from __future__ import annotations

import torch

from ..dispatch import use_kernel
from ..quantise.reference import GROUP, QuantRows
from . import reference
from .reference import QuantWeight, dequantise_weight, quantise_weight

__all__ = ["QuantWeight", "dequantise_weight", "linear", "linear_parts", "quantise_weight"]


def linear(x: torch.Tensor | QuantRows, weight: torch.Tensor | QuantWeight) -> torch.Tensor:
    """[R, in] x [out, in] -> [R, out] in x's dtype, accumulated in acc.

    Against a block-fp8 weight the rows are quantised 1x128 (unless they come as QuantRows) and
    the result is bf16 for fp8 rows. A row's bits do not depend on the rows beside it.
    """
    if isinstance(weight, QuantWeight):
        return _quantised(x, weight)
    assert isinstance(x, torch.Tensor)
    assert x.shape[1] == weight.shape[1], (x.shape, weight.shape)
    assert x.dtype == weight.dtype, (x.dtype, weight.dtype)
    if x.is_cuda:
        from . import launch

        if use_kernel("linear", "cuda", launch.unserved(x.shape[1], x.dtype)):
            return launch.linear(x.contiguous(), weight, x.dtype)
    return reference.linear(x, weight)


def linear_parts(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[R, in] x [out, in] -> [C, R, out], whose sum in order, rounded to x's dtype, is `linear`'s
    result bit for bit (`reference.added`). C and the parts' dtype are the device's choice."""
    if x.is_cuda:
        from . import launch, parts

        if use_kernel("linear", "cuda", launch.unserved(x.shape[1], x.dtype)):
            return parts.linear_parts(x.contiguous(), weight)
    return linear(x, weight)[None]


def _quantised(x: torch.Tensor | QuantRows, weight: QuantWeight) -> torch.Tensor:
    rows = x.values if isinstance(x, QuantRows) else x
    dtype = torch.bfloat16 if isinstance(x, QuantRows) else x.dtype
    outputs, depth = weight.values.shape
    assert rows.shape[1] == depth, (rows.shape, weight.values.shape)
    assert weight.scales.shape == (-(-outputs // GROUP), depth // GROUP), weight.scales.shape
    if rows.is_cuda:
        from ..quantise import launch as quantise_launch
        from . import launch

        if use_kernel("linear", "cuda", launch.unserved(depth, dtype, scaled=True)):
            if isinstance(x, torch.Tensor):
                x = quantise_launch.quantise(x.contiguous())
            return launch.linear(x, weight, dtype)
    return reference.quant_linear(x, weight).to(dtype)
