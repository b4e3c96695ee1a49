# SPDX-License-Identifier: Apache-2.0
"""(row, expert) pairs sorted by expert; each hit expert is two products over its own rows."""

from __future__ import annotations

import itertools

import torch

from ..precision import acc_dtype
from ..swiglu.reference import swiglu


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    first: int,
    shared: torch.Tensor,
) -> torch.Tensor:
    count, linear = gate_up.shape[0], torch.nn.functional.linear
    local = ids.flatten() - first
    sorted_ids, pairs = local.sort(stable=True)
    bounds = torch.searchsorted(sorted_ids, torch.arange(count + 1, device=x.device)).tolist()
    acc = acc_dtype(x.dtype)
    total = shared.to(acc)
    pairs = pairs[bounds[0] : bounds[-1]]  # what lies outside is other ranks' work
    if pairs.numel() == 0:
        return shared
    rows = pairs // ids.shape[1]
    gathered = x[rows]
    outputs = [
        linear(swiglu(linear(gathered[a - bounds[0] : b - bounds[0]], gate_up[e])), down[e])
        for e, (a, b) in enumerate(itertools.pairwise(bounds))
        if b > a
    ]
    scaled = torch.cat(outputs).to(acc) * weights.flatten()[pairs, None].to(acc)
    return total.index_add(0, rows, scaled).to(x.dtype)
