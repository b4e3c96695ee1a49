# SPDX-License-Identifier: Apache-2.0
"""Expert choice: sigmoid scores, a correction bias for the choice only, normalised weights."""

from __future__ import annotations

import torch

from . import reference


def route(
    x: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor, top_k: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [R, D], gate [E, D] acc, bias [E] acc -> (ids [R, top_k] int64 ascending, weights acc).

    Everything is done in acc: biases near 34 with steps far below a bf16 ULP choose the experts.
    Ties go to the lower expert id. The bias never enters a weight.
    """
    assert x.shape[1] == gate.shape[1], (x.shape, gate.shape)
    assert bias.shape == gate.shape[:1], (x.shape, gate.shape)
    assert gate.dtype == bias.dtype, gate.dtype
    assert gate.dtype in (torch.float32, torch.float64), gate.dtype
    assert 0 < top_k <= gate.shape[0], (top_k, gate.shape)
    return reference.route(x, gate, bias, top_k, scale)
