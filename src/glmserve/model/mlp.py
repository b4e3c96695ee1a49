# SPDX-License-Identifier: Apache-2.0
"""The SwiGLU block of dense layers and of the shared expert; this rank's columns, a partial."""

from __future__ import annotations

from torch import Tensor

from glmserve.checkpoint.weights import FfnWeights
from glmserve.kernels.linear import QuantWeight, linear
from glmserve.kernels.residual_norm import Normed
from glmserve.kernels.swiglu import swiglu, swiglu_quantised


def mlp(x: Normed, weights: FfnWeights) -> Tensor:
    """x [R, D] -> partial [R, D]; the sum over ranks is the block's output."""
    hidden = linear(x.for_weight(weights.gate_up), weights.gate_up)
    if isinstance(weights.down, QuantWeight):
        return linear(swiglu_quantised(hidden), weights.down)
    return linear(swiglu(hidden), weights.down)
