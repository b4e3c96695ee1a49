# SPDX-License-Identifier: Apache-2.0
"""Launches of top-k: which form serves a row's width.

Rows of a decode step lie in buffers as wide as the longest context, so every form is quick for
short rows too.
"""

from __future__ import annotations

import torch
import triton

from ..pdl import pdl
from .kernel import select_plain

WARPS = 16
TILE = 128 * WARPS
SHORT = 8 * TILE  # positions that one CTA holds in registers
SHORTER = 5 * TILE  # positions whose loads it has all under way at once
CLUSTER = 8  # CTAs a row, at most
MIDDLE = CLUSTER * SHORT  # that they hold in registers
SEGMENTS = 1032  # of 128 positions, that a CTA keeps marks of
LONGEST = CLUSTER * SEGMENTS * 128
MOST_K = 8192


def unserved(logits: torch.Tensor, k: int) -> dict[str, object]:
    """Dimensions that the kernels do not serve."""
    wrong: dict[str, object] = {}
    if k > MOST_K:
        wrong["k"] = k
    if logits.dtype != torch.float32:
        wrong["dtype"] = logits.dtype
    return wrong


def _form(rows: int, width: int) -> tuple[bool, int]:
    """(whether registers hold the scores, CTAs a row): more CTAs are quicker until those of all
    rows no longer run at once; then fewer, that share less, are."""
    if width > MIDDLE:
        return False, 4 if rows >= 32 and width <= 4 * SEGMENTS * 128 else CLUSTER
    holding = triton.next_power_of_2(-(-width // SHORT))
    return (False, 2) if holding == CLUSTER and rows >= 64 else (True, holding)


def topk_select(
    logits: torch.Tensor, k: int, last: torch.Tensor | None, first: int
) -> torch.Tensor:
    """As the operator, for k up to MOST_K. The interpreter takes the plain form for all rows, and
    rows of more than LONGEST positions do."""
    assert logits.is_contiguous(), logits.stride()
    rows, width = logits.shape
    k = min(k, width)
    device = logits.device
    out = torch.empty(rows, k, dtype=torch.int32, device=device)
    if last is None:
        last = torch.full((rows,), width - 1, dtype=torch.int64, device=device)
    if rows == 0:
        return out
    if device.type == "cpu" or width > LONGEST:
        select_plain[(rows,)](
            logits, last, out, width, first, k, WIDTH=2048 if k <= 2048 else MOST_K, N=8192,
            num_warps=16, **pdl(),
        )  # fmt: skip
        return out
    from .hopper.far import select_far
    from .hopper.near import select_near

    near, ctas = _form(rows, width)
    if near:
        tiles = (SHORTER if width <= SHORTER else SHORT) // TILE
        select_near[(rows,)](
            logits, last, out, width, first, k, CTAS=ctas, TILES=tiles, WARPS=WARPS,
            num_warps=WARPS, num_ctas=ctas, maxnreg=64, **pdl(),
        )  # fmt: skip
    else:
        select_far[(rows,)](
            logits, last, out, width, first, k, CTAS=ctas, SEGMENTS=SEGMENTS,
            WARPS=WARPS, UNROLL=8, num_warps=WARPS, num_ctas=ctas, maxnreg=64, **pdl(),
        )  # fmt: skip
    return out
