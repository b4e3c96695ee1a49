# SPDX-License-Identifier: Apache-2.0
"""Host side of logit shaping: fixed grids, no read-back."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ..pdl import pdl
from . import kernel
from .tables import ShapingTables

_BLOCK = 1024
_PROGRAMS = 1056  # of four warps: what 132 multiprocessors hold at once, twice


def unserved(dtype: torch.dtype) -> dict[str, object]:
    """Dimensions that the kernels do not serve."""
    return {} if dtype == torch.float32 else {"dtype": dtype}


def shape(
    logits: Tensor,
    tables: ShapingTables,
    first: int,
    rows: Tensor,
    positions: Tensor,
    ahead: Tensor,
    stops: Tensor,
    stops_from: Tensor,
) -> Tensor:
    """As the operator, for fp32 logits."""
    logits = logits.contiguous()
    count, width = logits.shape
    assert rows.is_contiguous() and positions.is_contiguous(), "read by place"
    assert stops.stride(1) == 1 and (ahead.shape[1] < 2 or ahead.stride(1) == 1), "lines"
    out = torch.empty_like(logits)
    if count == 0:
        return out
    total = -(-width // _BLOCK)
    blocks = -(-total // max(1, min(total, _PROGRAMS // count)))
    kernel.shape_rows[(-(-total // blocks), count)](
        logits, out, rows, positions, ahead, stops, stops_from,
        tables.flags, tables.penalties, tables.counts, tables.bias, tables.in_prompt,
        tables.allowed, tables.words, tables.recent,
        ahead.stride(0), stops.stride(0), stops_from.stride(0), width, -(-width // 32), first,
        blocks, stops.shape[1], ahead.shape[1], max(32, triton.next_power_of_2(stops.shape[1])),
        _BLOCK, num_warps=4, enable_fp_fusion=False, **pdl(),
    )  # fmt: skip
    return out


def confirm(tables: ShapingTables, first: int, rows: Tensor, tokens: Tensor, count: Tensor) -> None:
    """As the operator."""
    assert tokens.shape[1] == 1 or tokens.stride(1) == 1, "lines of tokens"
    if len(rows) == 0:
        return
    kernel.confirm_rows[(len(rows),)](
        rows, tokens, count, tables.flags, tables.counts, tables.recent,
        rows.stride(0), tokens.stride(0), count.stride(0), tables.counts.shape[1], first,
        max(16, triton.next_power_of_2(tokens.shape[1])), num_warps=1, **pdl(),
    )  # fmt: skip


def shut_ids(logits: Tensor, places: Tensor, bits: Tensor, first: int, first_word: int) -> None:
    """As the operator, for fp32 logits."""
    width = logits.shape[1]
    assert logits.is_contiguous() and bits.stride(1) == 1, "changed in place, by lines"
    if len(places) == 0:
        return
    kernel.shut_rows[(-(-width // _BLOCK), len(places))](
        logits, places, bits, places.stride(0), bits.stride(0), width, first, first_word, _BLOCK,
        num_warps=4, **pdl(),
    )  # fmt: skip
