# SPDX-License-Identifier: Apache-2.0
"""silu(g) * u = g * sigmoid(g) * u."""

from __future__ import annotations

import torch

from ..precision import acc_dtype


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.to(acc_dtype(gate_up.dtype)).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)
