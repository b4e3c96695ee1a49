# SPDX-License-Identifier: Apache-2.0
"""Value up-projection on the shared head product."""

from __future__ import annotations

import torch

from ..head_product import kernel
from ..quantise.launch import empty_rows
from ..quantise.reference import QuantRows


def unserved(latent: torch.Tensor, w_uv: torch.Tensor) -> dict[str, object]:
    """Dimensions that the kernel does not serve."""
    wrong = kernel.unserved(w_uv.shape[2], w_uv.shape[1])
    if latent.dtype != torch.bfloat16:
        wrong["dtype"] = latent.dtype
    return wrong


def value_up(latent: torch.Tensor, w_uv: torch.Tensor) -> torch.Tensor:
    rows, heads, _ = latent.shape
    out = torch.empty(rows, heads, w_uv.shape[1], dtype=latent.dtype, device=latent.device)
    kernel.multiply_heads(latent, w_uv.transpose(1, 2), out, None)
    return out.flatten(1)


def value_up_quantised(latent: torch.Tensor, w_uv: torch.Tensor) -> QuantRows:
    """For heads of 128s of values."""
    rows, heads, _ = latent.shape
    out = empty_rows(rows, heads * w_uv.shape[1], latent.device)
    values = out.values.view(rows, heads, -1)
    kernel.multiply_heads(latent, w_uv.transpose(1, 2), values, None, out.scales)
    return out
