# SPDX-License-Identifier: Apache-2.0
"""[W_UK^T q_nope | rope(q_rope)]; for the indexer [rope(q[:rope]) | q[rope:]] and w * scale."""

from __future__ import annotations

import torch

from ..linear.reference import added
from ..precision import acc_dtype
from ..quant import quantise_index
from ..rope.reference import rotate


def absorb_query(query: torch.Tensor, w_uk: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    nope = w_uk.shape[1]
    latent = torch.bmm(query[..., :nope].transpose(0, 1), w_uk).transpose(0, 1)
    return torch.cat((latent, rotate(query[..., nope:], rope).to(query.dtype)), -1)


def index_query(
    query: torch.Tensor, head_weights: torch.Tensor, rope: torch.Tensor, fp8: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    heads, dim = query.shape[1:]
    rope_dim = 2 * rope.shape[1]
    acc = acc_dtype(query.dtype)
    weights = added(head_weights, query.dtype).to(acc) * (dim * heads) ** -0.5
    roped = torch.cat((rotate(query[..., :rope_dim], rope), query[..., rope_dim:].to(acc)), -1)
    if fp8:
        values, scale = quantise_index(roped.float())
        return values, weights * scale
    return roped.to(query.dtype), weights
