# SPDX-License-Identifier: Apache-2.0
"""Results wait in their slots until they are read, and a slot that was written over is noticed."""

from __future__ import annotations

import pytest
import torch

from glmserve.kernels.row_state import columns
from glmserve.runtime.result_slots import SLOTS, ResultSlots

WIDTH = columns.result_width(1)


def some_results(sequences: int, number: int) -> torch.Tensor:
    return torch.full((sequences, WIDTH), number, dtype=torch.int32)


def test_results_of_the_steps_in_flight_are_read_late_and_in_any_size() -> None:
    slots = ResultSlots(4, 1, torch.device("cpu"))
    slots.send(some_results(4, 99))
    slots.restart()
    for _ in range(3):  # more steps than slots
        reads = []
        for number in range(SLOTS):
            sequences = 1 + number % 4
            slots.send(some_results(sequences, number))
            reads.append(slots.launched(sequences))
        for number, read in enumerate(reads):
            assert read().tolist() == some_results(1 + number % 4, number).tolist()


def test_a_slot_that_was_written_over_is_not_taken_for_another_step() -> None:
    slots = ResultSlots(1, 1, torch.device("cpu"))
    slots.send(some_results(1, 0))
    read = slots.launched(1)
    for number in range(SLOTS):
        slots.send(some_results(1, number))
    with pytest.raises(AssertionError):
        read()
