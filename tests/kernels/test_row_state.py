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


def some_sequences(device: torch.device, drafts: int) -> torch.Tensor:
    """Decoding rows, the padding row twice, nothing, and two prompts that end."""
    places = drafts + 1
    lines = [(row, i * places, i * places, -1) for i, row in enumerate((3, 0, 7, 1, 11, 11))]
    lines += [(11, -1, 0, -1), (9, 70, 6 * places, 40), (10, 75, 6 * places + 1, 64)]
    return torch.tensor(lines, device=device)


@pytest.mark.parametrize("drafts", [0, 1, 3, 5])
def test_places_equal_the_reference(device: torch.device, drafts: int) -> None:
    table, sequences = some_table(device, drafts), some_sequences(device, drafts)
    got, want = (
        [torch.full((80, *rest), -7, device=device) for rest in ((), (), (), (), (drafts,))]
        for _ in range(2)
    )
    reference.place_rows(table, sequences, *want)
    kernel.place_rows(table, sequences, *got)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    written = want[0] != -7
    assert written[: 6 * (drafts + 1)].all() and not written[6 * (drafts + 1) :].any()


@pytest.mark.parametrize("drafts", [0, 1, 3, 5])
def test_verification_equals_the_reference(device: torch.device, drafts: int) -> None:
    sequences = some_sequences(device, drafts)
    shape = (len(sequences), c.result_width(drafts))
    for _ in range(8):
        table = some_table(device, drafts)
        draws = torch.randint(0, 3, (6 * (drafts + 1) + 2,), device=device)
        outcomes = []
        for module in (reference, kernel):
            outcome = [
                table.clone(),
                torch.full((80,), -7, device=device),
                torch.empty(len(sequences), dtype=torch.int64, device=device),
                torch.zeros(shape, dtype=torch.int32, device=device),
            ]
            module.verify_rows(outcome[0], sequences, draws, drafts, *outcome[1:])
            for number in range(drafts):
                module.store_drafts(
                    outcome[0], sequences[:4], draws[:4] + number, number, drafts, outcome[3][:4]
                )
            outcomes.append(outcome)
        for a, b in zip(*outcomes, strict=True):
            assert torch.equal(a, b)
        results = outcomes[0][3]
        assert bool((results[4:7, c.COUNT] == 0).all())  # the padding row draws nothing
        assert bool((results[7:, c.COUNT] == 1).all())  # a prompt draws its first token


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


def test_results_are_sent_to_the_slots_in_turn(device: torch.device) -> None:
    """More results than slots, and more numbers than a block."""
    shapes = ((3, 5), (600, 13), (1, 3))
    pinned = device.type == "cuda"
    for module in (reference, kernel):
        slots = torch.zeros(2, c.SLOT_HEAD + 600 * 13, dtype=torch.int32, pin_memory=pinned)
        sent = torch.zeros(1, dtype=torch.int64, device=device)
        for number, shape in enumerate(shapes):
            results = torch.randint(0, 1 << 30, shape, dtype=torch.int32, device=device)
            module.send_results(results, slots, sent)
            assert int(sent) == number + 1  # waits for the device
            slot = slots[number % 2]
            assert int(slot[0]) == number + 1
            got = slot[c.SLOT_HEAD : c.SLOT_HEAD + results.numel()]
            assert torch.equal(got.view(shape), results.cpu())
