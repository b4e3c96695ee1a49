# SPDX-License-Identifier: Apache-2.0
"""The routed FFN of one layer: router, this rank's experts and its columns of the shared expert.

Rows are the same on every rank, so no exchange is needed: each rank adds what its experts give and
the layer boundary sums. The router is replicated and decides identically everywhere.
"""

from __future__ import annotations

from torch import Tensor

from glmserve.checkpoint.weights import MoeWeights
from glmserve.kernels.experts import (
    experts,
    first_tensor,
    fused_ffn,
    fused_tile,
    sort_choices,
)
from glmserve.kernels.residual_norm import Normed
from glmserve.kernels.router import ChoiceCount, route, route_sorted
from glmserve.model.mlp import mlp
from glmserve.model.taps import Routing, Taps
from glmserve.model_config import ModelConfig


def moe(
    x: Normed,
    weights: MoeWeights,
    config: ModelConfig,
    taps: Taps | None = None,
    count: ChoiceCount | None = None,
) -> tuple[Tensor, Routing]:
    """x [R, D] normed -> (this rank's partial [R, D], routing)."""
    gate = (
        x.rows,
        weights.gate,
        weights.bias,
        config.num_experts_per_tok,
        config.routed_scaling_factor,
        count,
    )
    held, shared, first = (weights.gate_up, weights.down), weights.shared, weights.first
    tile = fused_tile(x.rows, *held, shared.gate_up, shared.down)
    if tile is None or x.quantised is None:
        chosen = Routing(*route(*gate))
        if taps is not None:
            chosen = taps.routed(chosen)
        rows = (x.rows, chosen.ids, chosen.weights)
        return experts(*rows, *held, first, mlp(x, shared), x.quantised), chosen
    local = len(first_tensor(weights.gate_up))
    ids, shares, pairs = route_sorted(*gate, first, local, tile)
    chosen = Routing(ids, shares)
    if taps is not None:
        chosen = taps.routed(chosen)
        pairs = sort_choices(chosen.ids, first, local, tile)
    both = (shared.gate_up, shared.down)
    return fused_ffn(x.quantised, chosen.weights, pairs, *held, *both), chosen
