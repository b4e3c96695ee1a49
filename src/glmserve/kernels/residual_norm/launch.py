# SPDX-License-Identifier: Apache-2.0
"""Host side of the norms."""

from __future__ import annotations

import torch
import triton

from ..pdl import pdl
from ..quantise.launch import empty_rows
from ..quantise.reference import GROUP, QuantRows
from . import kernel


def unserved(dtype: torch.dtype, x_dtype: torch.dtype) -> dict[str, object]:
    """Why no kernel takes a residual in `dtype` and rows in `x_dtype`."""
    reasons: dict[str, object] = {}
    if dtype != torch.bfloat16:
        reasons["dtype"] = dtype
    if x_dtype not in (torch.bfloat16, torch.float32):
        reasons["rows"] = x_dtype
    return reasons


def residual_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    quantised: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, QuantRows | None]:
    """(normed, x + residual, normed in fp8 or None); all [R, D]. Without a residual and with rows
    in the weight's dtype the second is x itself."""
    rows, width = x.shape
    normed = torch.empty(rows, width, dtype=weight.dtype, device=x.device)
    alone = residual is None and x.dtype == weight.dtype
    total = x if alone else torch.empty(rows, width, dtype=weight.dtype, device=x.device)
    rows8 = empty_rows(rows, width, x.device) if quantised else None
    groups = triton.next_power_of_2(-(-width // GROUP))
    kernel.residual_norm_rows[(rows,)](
        x, x if residual is None else residual, weight, normed, total,
        normed if rows8 is None else rows8.values, weight if rows8 is None else rows8.scales,
        rows, width, eps, residual is not None, not alone, quantised, groups,
        num_warps=8 if groups >= 32 else 4, **pdl(),
    )  # fmt: skip
    return normed, total, rows8
