# SPDX-License-Identifier: Apache-2.0
"""Bounds on how far rows have come, for the host: it plans ahead of the confirmed lengths."""

from __future__ import annotations

from collections import deque

from glmserve.messages import StepPlan
from glmserve.runtime.packing import Places


class Reach:
    """One thread plans; another one may confirm."""

    def __init__(self, rows: int) -> None:
        self._most = [0] * rows  # tokens that a row may know by now
        self._surplus: deque[tuple[int, int]] = deque()

    def plan(self, plan: StepPlan, places: Places) -> int:
        """Positions that the furthest row of the step may see; counts the step's tokens in."""
        while self._surplus:
            row, surplus = self._surplus.popleft()
            self._most[row] -= surplus
        seen = 0
        for row in places.decode:
            seen = max(seen, self._most[row] + places.width - 1)
            self._most[row] += places.width
        for chunk in plan.prefill:
            end = chunk.start + chunk.length
            seen = max(seen, end)
            if chunk.final:
                self._most[chunk.row] = end + 1
        return seen

    def confirm(self, row: int, surplus: int) -> None:
        """A step of the row has confirmed `surplus` tokens less than were counted."""
        self._surplus.append((row, surplus))
