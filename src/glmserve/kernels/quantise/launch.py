# SPDX-License-Identifier: Apache-2.0
"""Host side of the quantisation kernel."""

from __future__ import annotations

import torch

from ..pdl import pdl
from . import kernel
from .reference import GROUP, QuantRows

_BLOCK = 8  # groups a program


def empty_rows(rows: int, width: int, device: torch.device) -> QuantRows:
    """Uninitialised quantised rows."""
    return QuantRows(
        torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=device),
        torch.empty(width // GROUP, rows, dtype=torch.float32, device=device),
    )


def quantise(x: torch.Tensor) -> QuantRows:
    rows, width = x.shape
    groups = width // GROUP
    out = empty_rows(rows, width, x.device)
    grid = (rows, -(-groups // _BLOCK))
    kernel.quantise_rows[grid](
        x, out.values, out.scales, rows, groups, _BLOCK, num_warps=4, **pdl(grid[0] * grid[1])
    )
    return out
