# SPDX-License-Identifier: Apache-2.0
"""Routed experts of one rank: grouped gate_up, SwiGLU, grouped down, weighted combine.

Serves both expert layouts. Whole experts: the rank holds experts [first, first + E) and skips the
rest. Sliced: it holds a column slice of every expert, so `first` is 0 and each result is a partial
sum. Either way the ranks' results add up to the layer's.
"""

from __future__ import annotations

import torch

from . import reference


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    first: int,
    shared: torch.Tensor,
) -> torch.Tensor:
    """shared + sum over the row's local experts of weight * down(swiglu(gate_up x)), [R, D].

    x        [R, D]
    ids      [R, k] int64, experts of the whole model; weights [R, k] acc
    gate_up  [E, 2 I, D], gate rows first; down [E, D, I]
    shared   [R, D], this rank's part of the shared expert, not scaled
    Summed in acc in ascending order of the expert, rounded once.
    """
    assert ids.shape == weights.shape, (ids.shape, weights.shape)
    assert ids.shape[0] == x.shape[0], (ids.shape, weights.shape)
    assert gate_up.shape[0] == down.shape[0]
    assert gate_up.shape[1] == 2 * down.shape[2]
    assert x.shape[1] == gate_up.shape[2] == down.shape[1]
    assert shared.shape == x.shape
    return reference.experts(x, ids, weights, gate_up, down, first, shared)
