# SPDX-License-Identifier: Apache-2.0
"""The routed FFN of one layer: router, this rank's experts and its columns of the shared expert.

Rows are the same on every rank, so no exchange is needed: each rank adds what its experts give and
the layer boundary sums. The router is replicated and decides identically everywhere.
"""

from __future__ import annotations

from torch import Tensor

from glmserve.checkpoint.weights import MoeWeights
from glmserve.kernels.experts import experts
from glmserve.kernels.residual_norm import Normed
from glmserve.kernels.router import ChoiceCount, route
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
    chosen = Routing(
        *route(
            x.rows,
            weights.gate,
            weights.bias,
            config.num_experts_per_tok,
            config.routed_scaling_factor,
            count,
        )
    )
    if taps is not None:
        chosen = taps.routed(chosen)
    shared = mlp(x, weights.shared)
    partial = experts(
        x.rows,
        chosen.ids,
        chosen.weights,
        weights.gate_up,
        weights.down,
        weights.first,
        shared,
        x.quantised,
    )
    return partial, chosen
