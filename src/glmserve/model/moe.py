# SPDX-License-Identifier: Apache-2.0
"""The routed FFN of one layer: router, this rank's experts and its columns of the shared expert.

Rows are the same on every rank, so no exchange is needed: each rank adds what its experts give and
the layer boundary sums. The router is replicated and decides identically everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from glmserve.checkpoint.weights import MoeWeights
from glmserve.kernels.experts import experts
from glmserve.kernels.residual_norm import Normed
from glmserve.kernels.router import route
from glmserve.model.mlp import mlp
from glmserve.model_config import ModelConfig


@dataclass(frozen=True)
class Routing:
    """The router's decision: experts ascending, weights normed and scaled."""

    ids: Tensor  # [R, k] int64
    weights: Tensor  # [R, k] acc


def moe(x: Normed, weights: MoeWeights, config: ModelConfig) -> tuple[Tensor, Routing]:
    """x [R, D] normed -> (this rank's partial [R, D], routing)."""
    ids, shares = route(
        x.rows, weights.gate, weights.bias, config.num_experts_per_tok, config.routed_scaling_factor
    )
    shared = mlp(x, weights.shared)
    partial = experts(
        x.rows, ids, shares, weights.gate_up, weights.down, weights.first, shared, x.quantised
    )
    return partial, Routing(ids, shares)
