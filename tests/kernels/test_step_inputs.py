# SPDX-License-Identifier: Apache-2.0
"""The step's table, limits and slots, and gathered rows, against their references."""

from __future__ import annotations

import pytest
import torch

from glmserve.kernels.step_inputs import reference
from glmserve.kernels.step_inputs.kernel import step_inputs
from glmserve.kernels.take_rows.kernel import take_rows, unserved


@pytest.mark.parametrize(("ahead", "shift"), [(0, 0), (0, 1), (3, 1)])
def test_equals_the_reference_up_to_a_million_positions(
    device: torch.device, ahead: int, shift: int
) -> None:
    positions = torch.tensor([0, 1, 63, 8191, 102_399, 777_777, 1_048_571], device=device)
    table = torch.randperm(3 * 16_385, device=device, dtype=torch.int32).view(3, 16_385)
    lines = torch.tensor([0, 0, 2, 1, 1, 2, 0], device=device)
    got = step_inputs(positions, lines, table, 64, ahead, shift, 64, 8e6)
    want = reference.step_inputs(positions, lines, table, 64, ahead, shift, 64, 8e6, torch.float32)
    assert got.rope.shape == (7, 32, 2)
    assert (got.rope - want.rope).abs().max() < 1e-5
    assert torch.equal(got.last, want.last)
    assert torch.equal(got.own_slots.long(), want.own_slots)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((9,), torch.int64),
        ((9, 6), torch.bfloat16),
        ((9, 1500), torch.int32),
        ((9, 3, 40), torch.float32),
    ],
)
def test_taken_rows_are_copies(
    device: torch.device, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = torch.randint(-(1 << 20), 1 << 20, shape, device=device).to(dtype)
    index = torch.tensor([8, 0, 0, 5], device=device)
    assert not unserved(x)
    assert torch.equal(take_rows(x, index), x[index])
    assert unserved(torch.zeros(3, 1, dtype=torch.bfloat16)) == {"row bytes": 2}
