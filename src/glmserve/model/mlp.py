# SPDX-License-Identifier: Apache-2.0
"""The SwiGLU block of dense layers and of the shared expert; this rank's columns, a partial."""

from __future__ import annotations

from torch import Tensor

from glmserve.checkpoint.weights import FfnWeights
from glmserve.kernels.linear import linear
from glmserve.kernels.swiglu import swiglu


def mlp(x: Tensor, weights: FfnWeights) -> Tensor:
    """x [R, D] -> partial [R, D]; the sum over ranks is the block's output."""
    return linear(swiglu(linear(x, weights.gate_up)), weights.down)
