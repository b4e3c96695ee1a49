# SPDX-License-Identifier: Apache-2.0
"""Results wait in their slots until they are read; no step takes a slot before that."""

from __future__ import annotations

import pytest
import torch

from glmserve.errors import EngineError
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
            reads.append(slots.take(sequences))
            slots.send(some_results(sequences, number))
        for number, read in enumerate(reads):
            assert read().tolist() == some_results(1 + number % 4, number).tolist()


def test_a_slot_is_not_taken_before_its_result_is_read() -> None:
    slots = ResultSlots(1, 1, torch.device("cpu"))
    reads = []
    for number in range(SLOTS):
        reads.append(slots.take(1))
        slots.send(some_results(1, number))
    with pytest.raises(EngineError, match="not read"):
        slots.take(1)
    assert reads[0]().tolist() == some_results(1, 0).tolist()
    again = slots.take(1)
    slots.send(some_results(1, SLOTS))
    assert [read()[0, 0] for read in (*reads[1:], again)] == list(range(1, SLOTS + 1))


def test_results_that_nobody_holds_are_not_waited_for() -> None:
    """The ranks behind the first one replay the same steps and report nothing."""
    slots = ResultSlots(1, 1, torch.device("cpu"))
    for number in range(3 * SLOTS):
        read = slots.take(1)
        slots.send(some_results(1, number))
    assert read().tolist() == some_results(1, number).tolist()


def test_a_replay_that_took_no_slot_is_noticed() -> None:
    slots = ResultSlots(1, 1, torch.device("cpu"))
    read = slots.take(1)
    for number in range(SLOTS + 1):
        slots.send(some_results(1, number))
    with pytest.raises(AssertionError):
        read()
