# SPDX-License-Identifier: Apache-2.0
"""The gated activation between an FFN's two projections."""

from __future__ import annotations

import torch

from . import reference


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """[R, 2 I] = [gate | up] -> silu(gate) * up, [R, I]; computed in acc, one cast."""
    assert gate_up.shape[-1] % 2 == 0, gate_up.shape
    return reference.swiglu(gate_up)
