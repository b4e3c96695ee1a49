# SPDX-License-Identifier: Apache-2.0
"""Slot lookup against the reference, exactly."""

from __future__ import annotations

import pytest
import torch

from glmserve.kernels.slot_lookup import reference
from glmserve.kernels.slot_lookup.kernel import slot_lookup


@pytest.mark.parametrize("k", [1, 63, 1500])
def test_equals_the_reference(device: torch.device, k: int) -> None:
    table = torch.randperm(90, device=device, dtype=torch.int32).view(3, 30)
    positions = torch.randint(-1, 30 * 64, (5, k), device=device, dtype=torch.int32)
    rows = torch.tensor([0, 0, 1, 2, 2], device=device)
    want = reference.slot_lookup(positions, table, rows, 64)
    assert torch.equal(slot_lookup(positions, table, rows, 64).long(), want)
    wide = positions.long()  # the rows' own positions are int64
    assert torch.equal(slot_lookup(wide, table, rows, 64).long(), want)
