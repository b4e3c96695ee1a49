# SPDX-License-Identifier: Apache-2.0
"""p = sigmoid(x G^T); ids = top-k of p + b; weight = p[id] / (sum + 1e-20) * scale."""

from __future__ import annotations

import torch


def route(
    x: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor, top_k: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    p = torch.nn.functional.linear(x.to(gate.dtype), gate).sigmoid()
    order = (p + bias).sort(dim=-1, descending=True, stable=True).indices
    ids = order[:, :top_k].sort(dim=-1).values
    chosen = p.gather(1, ids)
    return ids, chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * scale
