# SPDX-License-Identifier: Apache-2.0
"""Logical positions to physical slots in the Triton language."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..pdl import pdl
from ..triton_common import let_next_start, wait_for_previous


@triton.jit(do_not_specialize=["k", "table_width"])
def look_up(
    positions, page_table, row_seq, slots, k, table_width,
    PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    let_next_start()
    row = tl.program_id(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = i < k
    wait_for_previous()
    p = tl.load(positions + row * k + i, mask=there, other=-1).to(tl.int32)
    line = page_table + tl.load(row_seq + row) * table_width
    page = tl.load(line + tl.maximum(p, 0) // PAGE, mask=there & (p >= 0), other=0)
    slot = tl.where(p >= 0, page * PAGE + p % PAGE, -1)
    tl.store(slots + row * k + i, slot.to(slots.dtype.element_ty), mask=there)


def slot_lookup(
    positions: torch.Tensor, page_table: torch.Tensor, row_seq: torch.Tensor, page_size: int
) -> torch.Tensor:
    """As the operator, for page sizes that are powers of two; slots are int32."""
    assert page_size & (page_size - 1) == 0, page_size
    positions = positions.contiguous()
    assert page_table.is_contiguous(), page_table.stride()
    rows, k = positions.shape
    slots = torch.empty(rows, k, dtype=torch.int32, device=positions.device)
    if slots.numel():
        look_up[(rows, triton.cdiv(k, 1024))](
            positions, page_table, row_seq, slots, k, page_table.shape[1],
            PAGE=page_size, BLOCK=1024, num_warps=4, **pdl(),
        )  # fmt: skip
    return slots
