# SPDX-License-Identifier: Apache-2.0
"""Host side of the weighted sum of what a row's experts gave."""

from __future__ import annotations

import torch

from ..pdl import pdl
from . import kernel
from .pairs import SortedPairs

_BLOCK = 1024  # columns a program


def combine(
    parts: torch.Tensor, pairs: SortedPairs, weights: torch.Tensor, shared: torch.Tensor
) -> torch.Tensor:
    """shared [R, D] + the weighted sum of each row's local pairs in parts [splits, pairs, D]."""
    rows, top_k = weights.shape
    width = shared.shape[1]
    out = torch.empty_like(shared)
    kernel.combine_rows[(rows, -(-width // _BLOCK))](
        parts, pairs.place, weights, shared, out, pairs.order.numel(), width, top_k,
        parts.shape[0], _BLOCK, num_warps=4, **pdl(),
    )  # fmt: skip
    return out
