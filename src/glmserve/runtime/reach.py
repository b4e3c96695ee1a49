# SPDX-License-Identifier: Apache-2.0
"""Bounds on how far rows have come, for the host: it plans ahead of the confirmed lengths."""

from __future__ import annotations

from collections import deque

import numpy as np

from glmserve.messages import IntArray, StepPlan
from glmserve.runtime.packing import Places


class Reach:
    """One thread plans; another one may confirm."""

    def __init__(self, rows: int) -> None:
        self._most = np.zeros(rows, dtype=np.int64)  # tokens that a row may know by now
        self._surplus: deque[tuple[IntArray, IntArray]] = deque()

    def plan(self, plan: StepPlan, places: Places) -> int:
        """Positions that the furthest row of the step may see; counts the step's tokens in."""
        while self._surplus:
            rows, surplus = self._surplus.popleft()
            self._most[rows] -= surplus
        seen = 0
        if places.decode:
            decoding = places.drawing[: len(places.decode)]
            most = self._most[decoding] + places.width
            seen = int(most.max()) - 1
            self._most[decoding] = most
        for chunk in plan.prefill:
            end = chunk.start + chunk.length
            seen = max(seen, end)
            if chunk.final:
                self._most[chunk.row] = end + 1
        return seen

    def confirm(self, rows: IntArray, surplus: IntArray) -> None:
        """A step of these rows has confirmed so many tokens less than were counted of each."""
        self._surplus.append((rows, surplus))
