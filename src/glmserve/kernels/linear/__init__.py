# SPDX-License-Identifier: Apache-2.0
"""Dense projections without bias."""

from __future__ import annotations

import torch

from . import reference


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[R, in] x [out, in] -> [R, out] in x's dtype, accumulated in acc."""
    assert x.shape[1] == weight.shape[1], (x.shape, weight.shape)
    assert x.dtype == weight.dtype, (x.shape, weight.shape)
    return reference.linear(x, weight)
