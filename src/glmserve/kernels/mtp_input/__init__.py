# SPDX-License-Identifier: Apache-2.0
"""Input of an MTP layer: the next token's embedding and the previous hidden state, each normed."""

from __future__ import annotations

import torch

from ..dispatch import use_kernel
from . import reference


def mtp_input(
    embedding: torch.Tensor,
    hidden: torch.Tensor,
    embedding_norm: torch.Tensor,
    hidden_norm: torch.Tensor,
    eps: float,
    columns: slice | None = None,
) -> torch.Tensor:
    """[rms(embedding) | rms(hidden)], embedding first: two [R, D] -> [R, 2 D], input of eh_proj;
    or those `columns` of it alone that this rank's share of eh_proj reads."""
    assert embedding.shape == hidden.shape, (embedding.shape, hidden.shape)
    if columns is not None:
        assert 0 <= columns.start < columns.stop <= 2 * hidden.shape[1], columns
    if hidden.is_cuda:
        from . import launch

        served = hidden.dtype == torch.bfloat16
        if use_kernel("mtp_input", "cuda", {} if served else {"dtype": hidden.dtype}):
            return launch.mtp_input(
                embedding.contiguous(), hidden.contiguous(), embedding_norm, hidden_norm, eps,
                columns,
            )  # fmt: skip
    return reference.mtp_input(embedding, hidden, embedding_norm, hidden_norm, eps, columns)
