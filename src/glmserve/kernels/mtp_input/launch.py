# SPDX-License-Identifier: Apache-2.0
"""Host side of the MTP layer's input."""

from __future__ import annotations

import torch
import triton

from ..pdl import pdl
from . import kernel


def mtp_input(
    embedding: torch.Tensor,
    hidden: torch.Tensor,
    embedding_norm: torch.Tensor,
    hidden_norm: torch.Tensor,
    eps: float,
    columns: slice | None = None,
) -> torch.Tensor:
    rows, width = hidden.shape
    first, stop = (0, 2 * width) if columns is None else (columns.start, columns.stop)
    out = torch.empty(rows, stop - first, dtype=hidden.dtype, device=hidden.device)
    groups = triton.next_power_of_2(-(-width // 128))
    kernel.mtp_rows[(rows, 2)](
        embedding, hidden, embedding_norm, hidden_norm, out, width, first, stop - first, eps,
        groups, num_warps=8 if groups >= 32 else 4, **pdl(2 * rows),
    )  # fmt: skip
    return out
