# SPDX-License-Identifier: Apache-2.0
"""concat(rms(e, enorm), rms(g, hnorm))."""

from __future__ import annotations

import torch

from ..residual_norm.reference import rms_norm


def mtp_input(
    embedding: torch.Tensor,
    hidden: torch.Tensor,
    embedding_norm: torch.Tensor,
    hidden_norm: torch.Tensor,
    eps: float,
    columns: slice | None = None,
) -> torch.Tensor:
    pair = torch.cat(
        (rms_norm(embedding, embedding_norm, eps), rms_norm(hidden, hidden_norm, eps)), -1
    )
    return pair if columns is None else pair[:, columns].contiguous()
