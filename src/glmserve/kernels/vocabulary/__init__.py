# SPDX-License-Identifier: Apache-2.0
"""The two ends of the model, each cut over ranks along the vocabulary."""

from __future__ import annotations

import torch

from ..dispatch import use_kernel
from . import reference


def embed_shard(tokens: torch.Tensor, table: torch.Tensor, first: int) -> torch.Tensor:
    """Rows of `table` [V / N, D] for ids in [first, first + V / N), zeros for others: [R, D].

    Exactly one rank contributes a row that is not zero, so the ranks' sum is exact.
    """
    assert tokens.dim() == 1, (tokens.shape, table.shape)
    assert table.dim() == 2, (tokens.shape, table.shape)
    if table.is_cuda:
        from . import launch

        return launch.embed_shard(tokens.contiguous(), table, first)
    return reference.embed_shard(tokens, table, first)


def head_shard(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[R, D] x [V / N, D] -> this rank's logits [R, V / N] in acc (never rounded to bf16)."""
    assert hidden.shape[1] == weight.shape[1], (hidden.shape, weight.shape)
    if hidden.is_cuda:
        from ..linear.launch import unserved
        from . import launch

        if use_kernel("head_shard", "cuda", unserved(hidden.shape[1], hidden.dtype)):
            return launch.head_shard(hidden.contiguous(), weight)
    return reference.head_shard(hidden, weight)
