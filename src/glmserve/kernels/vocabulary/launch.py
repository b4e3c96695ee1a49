# SPDX-License-Identifier: Apache-2.0
"""Host side of the embedding and of the head."""

from __future__ import annotations

import torch

from ..linear import launch as linear_launch
from ..pdl import pdl
from . import kernel

_BLOCK = 1024


def embed_shard(tokens: torch.Tensor, table: torch.Tensor, first: int) -> torch.Tensor:
    rows, (held, width) = tokens.shape[0], table.shape
    out = torch.empty(rows, width, dtype=table.dtype, device=table.device)
    grid = (rows, -(-width // _BLOCK))
    kernel.embed_rows[grid](
        tokens, table, out, first, held, width, _BLOCK, num_warps=4, **pdl(grid[0] * grid[1])
    )
    return out


def head_shard(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return linear_launch.linear(hidden, weight, torch.float32)
