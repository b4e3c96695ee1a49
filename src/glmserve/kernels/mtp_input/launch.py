# SPDX-License-Identifier: Apache-2.0
"""Host side of the MTP layer's input."""

from __future__ import annotations

import torch
import triton

from . import kernel


def mtp_input(
    embedding: torch.Tensor,
    hidden: torch.Tensor,
    embedding_norm: torch.Tensor,
    hidden_norm: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    rows, width = hidden.shape
    out = torch.empty(rows, 2 * width, dtype=hidden.dtype, device=hidden.device)
    groups = triton.next_power_of_2(-(-width // 128))
    kernel.mtp_rows[(rows, 2)](
        embedding, hidden, embedding_norm, hidden_norm, out, width, eps, groups,
        num_warps=8 if groups >= 32 else 4,
    )  # fmt: skip
    return out
