# SPDX-License-Identifier: Apache-2.0
"""A masked table lookup, and a projection whose result keeps acc."""

from __future__ import annotations

import torch

from ..precision import acc_dtype


def embed_shard(tokens: torch.Tensor, table: torch.Tensor, first: int) -> torch.Tensor:
    local = tokens - first
    elsewhere = (local < 0) | (local >= table.shape[0])
    rows = table[local.masked_fill(elsewhere, 0)]
    return rows.masked_fill_(elsewhere[:, None], 0.0)


def head_shard(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    acc = acc_dtype(hidden.dtype)
    return torch.nn.functional.linear(hidden.to(acc), weight.to(acc))
