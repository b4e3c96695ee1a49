# SPDX-License-Identifier: Apache-2.0
"""How many tiles a program of `tiles.attend` takes, and the join of what they leave."""

from __future__ import annotations

import torch
import triton

from ...pdl import pdl
from ..joining import MANY_ROWS, MOST_TILES, TILE, join
from .tiles import attend

LONGEST = MOST_TILES * TILE  # selection


def _split(rows: int) -> tuple[int, int]:
    """(tiles a program, sums a program of the join) for so many rows."""
    if rows <= 8:
        return 1, 256
    return (4, 256) if rows <= 32 else (8, 512)


def launch(
    query: torch.Tensor,
    latent_cache: torch.Tensor,
    slots: torch.Tensor,
    out: torch.Tensor,
    scale: float,
) -> None:
    """As the operator, into out; rows of up to LONGEST slots; `scale` includes log2(e)."""
    rows, k = slots.shape
    if rows > MANY_ROWS:
        attend[(rows,)](
            query, latent_cache, slots, out, out, scale, k, 1, TILES=MOST_TILES, STAGES=2,
            PARTIAL=False, num_warps=4, **pdl(),
        )  # fmt: skip
        return
    tiles, span = _split(rows)
    units = triton.cdiv(k, TILE * tiles)
    kind = torch.bfloat16 if tiles == 8 else torch.float32  # pairs are rounded
    partial = torch.empty(rows, units, 4096, dtype=kind, device=query.device)
    sizes = torch.empty(rows, units, 2, 8, dtype=torch.float32, device=query.device)
    attend[(rows * units,)](
        query, latent_cache, slots, partial, sizes, scale, k, units, TILES=tiles,
        STAGES=min(tiles, 2), PARTIAL=True, num_warps=4, **pdl(),
    )  # fmt: skip
    join[(rows, 4096 // span)](
        partial, sizes, out, units, TILES=tiles, SPAN=span, num_warps=span // 128, **pdl()
    )
