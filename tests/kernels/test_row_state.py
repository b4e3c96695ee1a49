# SPDX-License-Identifier: Apache-2.0
"""The row state's kernels against their references, exactly, over random states."""

from __future__ import annotations

import pytest
import torch

from glmserve.kernels.row_state import columns as c
from glmserve.kernels.row_state import kernel, reference

LINES = 12  # the last one is the padding row


def some_table(device: torch.device, drafts: int) -> torch.Tensor:
    """Rows of few distinct tokens, so that drafts are accepted and stop ids are met."""
    table = torch.zeros(LINES, c.width(drafts), dtype=torch.int64)
    table[:, c.LENGTH] = torch.randint(1, 200, (LINES,))
    table[:, c.LAST_TOKEN] = torch.randint(0, 3, (LINES,))
    table[:, c.REMAINING] = torch.randint(1, 6, (LINES,))
    table[:, c.ACTIVE] = torch.rand(LINES) < 0.8
    table[:, c.STOPS : c.DRAFTS] = -1
    table[: LINES // 2, c.STOPS + 3] = 2
    table[:, c.DRAFTS : c.DRAFTS + drafts] = torch.randint(0, 3, (LINES, drafts))
    table[-1, c.ACTIVE] = 0
    return table.to(device)


@pytest.mark.parametrize("drafts", [0, 1, 3, 5])
def test_places_equal_the_reference(device: torch.device, drafts: int) -> None:
    table = some_table(device, drafts)
    rows = torch.tensor([3, 0, 7, 11, 11], device=device)
    count = len(rows) * (drafts + 1)
    got, want = (
        [torch.full((count + 2, *rest), -7, device=device) for rest in ((), (), (), (drafts,))]
        for _ in range(2)
    )
    reference.place_rows(table, rows, drafts, *want)
    kernel.place_rows(table, rows, drafts, *got)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("drafts", [0, 1, 3, 5])
@pytest.mark.parametrize("finals", [0, 2])
def test_verification_equals_the_reference(device: torch.device, drafts: int, finals: int) -> None:
    rows = torch.tensor([3, 0, 7, 1, 11, 11, 9, 10][: 6 + finals], device=device)
    for _ in range(8):
        table = some_table(device, drafts)
        draws = torch.randint(0, 3, (6 * (drafts + 1) + finals,), device=device)
        ends = torch.tensor([40, 64][:finals], dtype=torch.int64, device=device)
        numbers = torch.tensor([55, 70][:finals], dtype=torch.int64, device=device)
        results = []
        for verify in (reference.verify_rows, kernel.verify_rows):
            outputs = [
                table.clone(),
                torch.full((80,), -7, device=device),
                torch.empty(len(rows), dtype=torch.int64, device=device),
                torch.zeros(len(rows), c.result_width(drafts), dtype=torch.int32, device=device),
            ]
            verify(outputs[0], rows, draws, drafts, ends, numbers, *outputs[1:])
            for number in range(drafts):
                module = reference if verify is reference.verify_rows else kernel
                module.store_drafts(
                    outputs[0], rows[:4], draws[:4] + number, number, drafts, outputs[3][:4]
                )
            results.append(outputs)
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)
        assert bool((results[0][3][4:6, c.COUNT] == 0).all())  # the padding row draws nothing


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_page_ends_and_rows_are_put_as_the_reference_puts_them(
    device: torch.device, dtype: torch.dtype
) -> None:
    hidden = torch.randn(6, 1030, device=device).to(dtype)
    positions = torch.tensor([62, 63, 64, 127, 0, 191], device=device)
    row_seq = torch.tensor([0, 0, 0, 1, 2, 2], device=device)
    table = torch.randperm(12, device=device, dtype=torch.int32).view(3, 4)
    want = torch.zeros(12, 1030, dtype=dtype, device=device)
    got = want.clone()
    reference.keep_page_ends(hidden, positions, row_seq, table, 64, want)
    kernel.keep_page_ends(hidden, positions, row_seq, table, 64, got)
    assert torch.equal(got, want)
    assert int((want != 0).any(1).sum()) == 3
    index = torch.tensor([7, 1, 4], device=device)
    reference.put_rows(want, index, hidden[:3])
    kernel.put_rows(got, index, hidden[:3])
    assert torch.equal(got, want)
