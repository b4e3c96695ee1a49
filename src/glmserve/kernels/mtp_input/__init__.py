# SPDX-License-Identifier: Apache-2.0
"""Input of an MTP layer: the next token's embedding and the previous hidden state, each normed."""

from __future__ import annotations

import torch

from . import reference


def mtp_input(
    embedding: torch.Tensor,
    hidden: torch.Tensor,
    embedding_norm: torch.Tensor,
    hidden_norm: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """[rms(embedding) | rms(hidden)], embedding first: two [R, D] -> [R, 2 D], input of eh_proj."""
    assert embedding.shape == hidden.shape, (embedding.shape, hidden.shape)
    return reference.mtp_input(embedding, hidden, embedding_norm, hidden_norm, eps)
