# SPDX-License-Identifier: Apache-2.0
"""The rotary table against fp64 at short and at million-token positions."""

from __future__ import annotations

import torch

from glmserve.kernels.rope import reference
from glmserve.kernels.rope.kernel import rope_table


def test_equals_the_reference_up_to_a_million_positions(device: torch.device) -> None:
    positions = torch.tensor([0, 1, 63, 8191, 102_399, 777_777, 1_048_575], device=device)
    got = rope_table(positions, 64, 8e6)
    assert got.shape == (7, 32, 2)
    assert (got - reference.rope_table(positions, 64, 8e6, torch.float32)).abs().max() < 1e-5
