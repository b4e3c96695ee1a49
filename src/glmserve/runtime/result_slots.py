# SPDX-License-Identifier: Apache-2.0
"""Results of replayed steps in memory of the host that the device writes itself.

The last kernel of a graph puts the step's results into the next of a few slots, so that a step is
one launch and nothing follows it. Not its job: knowing when they are there (`results.Pending`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from glmserve.config import MOST_STEPS_IN_FLIGHT
from glmserve.errors import EngineError
from glmserve.kernels.row_state import columns, send_results

Lines = npt.NDArray[np.int32]

# A step is planned once the result `steps_in_flight` before it was read; twice that, because
# whoever drives a runner without an engine may read late.
SLOTS = 2 * MOST_STEPS_IN_FLIGHT


class _Place:
    """One step's results; its slot is another's once they are read or nobody holds this."""

    def __init__(self, slot: Tensor, number: int, sequences: int, width: int) -> None:
        self._slot, self._number, self._shape = slot, number, (sequences, width)
        self.read = False

    def __call__(self) -> Lines:
        line: Lines = self._slot.numpy()
        assert line[0] == self._number & 0x7FFFFFFF, (line[0], self._number)
        sequences, width = self._shape
        lines = line[columns.SLOT_HEAD : columns.SLOT_HEAD + sequences * width].copy()
        self.read = True
        return lines.reshape(self._shape)


class ResultSlots:
    def __init__(self, sequences: int, drafts: int, device: torch.device) -> None:
        """For steps of up to `sequences` sequences that draw."""
        self._width = columns.result_width(drafts)
        words = columns.SLOT_HEAD + sequences * self._width
        self._slots = torch.zeros(SLOTS, words, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._sent = torch.zeros(1, dtype=torch.int64, device=device)
        self.restart()

    def send(self, results: Tensor) -> None:
        """The operator that graphs end with: results [S, width] int32 of the device."""
        send_results(results, self._slots, self._sent)

    def restart(self) -> None:
        """Forgets what was sent, and by replays that took no slot."""
        self._sent.zero_()
        self._taken = 0
        self._places: list[weakref.ref[_Place] | None] = [None] * SLOTS

    def take(self, sequences: int) -> Callable[[], Lines]:
        """To be called before every replay, in order; what it returns reads the results
        [sequences, width] once the step is done. Ranks that report nothing drop it.

        Raises EngineError when the replay would write over results that are still to be read.
        """
        at = self._taken % SLOTS
        holder = self._places[at]
        before = holder() if holder else None
        if before is not None and not before.read:
            raise EngineError(f"{SLOTS} steps are launched and the first one's result is not read")
        self._taken += 1
        place = _Place(self._slots[at], self._taken, sequences, self._width)
        self._places[at] = weakref.ref(place)
        return place
