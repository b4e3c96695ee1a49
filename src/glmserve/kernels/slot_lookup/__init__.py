# SPDX-License-Identifier: Apache-2.0
"""Logical positions to physical cache slots, once per index group (and for the rows' own slots)."""

from __future__ import annotations

import torch

from ..dispatch import use_kernel
from . import reference


def slot_lookup(
    positions: torch.Tensor, page_table: torch.Tensor, row_seq: torch.Tensor, page_size: int
) -> torch.Tensor:
    """slot = page_table[row_seq[r], p // page_size] * page_size + p % page_size; -1 stays -1.

    positions [R, k] int, page_table [S, P] int32, row_seq [R] int64 -> [R, k] int64, from the
    kernel int32
    """
    assert positions.dim() == 2, (positions.shape, page_table.shape)
    assert page_table.dim() == 2, (positions.shape, page_table.shape)
    assert row_seq.shape == positions.shape[:1], (row_seq.shape, positions.shape)
    if positions.is_cuda:
        from . import kernel

        odd: dict[str, object] = (
            {} if page_size & (page_size - 1) == 0 else {"page size": page_size}
        )
        if use_kernel("slot_lookup", "cuda", odd):
            return kernel.slot_lookup(positions, page_table, row_seq, page_size)
    return reference.slot_lookup(positions, page_table, row_seq, page_size)
