# SPDX-License-Identifier: Apache-2.0
"""slot = page * page_size + offset; an unused place (-1) stays -1."""

from __future__ import annotations

import torch


def slot_lookup(
    positions: torch.Tensor, page_table: torch.Tensor, row_seq: torch.Tensor, page_size: int
) -> torch.Tensor:
    place = positions.clamp_min(0).long()
    pages = page_table[row_seq[:, None], place // page_size].long()
    slots = pages * page_size + place % page_size
    return slots.masked_fill_(positions < 0, -1)
