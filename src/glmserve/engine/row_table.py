# SPDX-License-Identifier: Apache-2.0
"""What planning and results need of every running row in every step, as columns by device row.

A step over 256 rows is then a few array operations; a sequence object is touched only when
something happens to it (a page fills, a page is needed, an end). Nothing here grows with the
context. Not its job: deciding anything.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from glmserve.config import PAGE_SIZE
from glmserve.messages import IntArray

# Tokens that a row may hold here: a page, the last token (not in the caches) and a step's.
_NEWEST = 2 * PAGE_SIZE


class RowTable:
    """All arrays are [max_rows]; the numbers of a row without a sequence mean nothing."""

    def __init__(self, max_rows: int) -> None:
        def integers() -> npt.NDArray[np.int64]:
            return np.zeros(max_rows, dtype=np.int64)

        self.live = np.zeros(max_rows, dtype=np.bool_)  # has a sequence that has not ended
        self.decoding = np.zeros(max_rows, dtype=np.bool_)  # and whose prompt is planned
        self.grammar = np.zeros(max_rows, dtype=np.bool_)  # and that follows a grammar
        self.length = integers()  # confirmed tokens, prompt and output
        self.limit = integers()  # length at which max_tokens is reached
        self.in_flight = integers()  # steps in flight that sample it
        self.last_step = integers()  # newest step whose plan names the row
        self.slots = integers()  # that its pages hold
        self.page_end = integers()  # length from which the next unpublished page is confirmed
        self._newest = np.zeros((max_rows, _NEWEST), dtype=np.int32)  # position p at p % _NEWEST

    def append(self, rows: IntArray, counts: IntArray, tokens: IntArray) -> None:
        """Adds confirmed tokens: the columns of a StepResult."""
        before = self.length[rows]
        starts = counts.cumsum() - counts
        positions = np.arange(len(tokens)) + (before - starts).repeat(counts)
        self._newest[rows.repeat(counts), positions % _NEWEST] = tokens
        self.length[rows] = before + counts

    def tokens(self, row: int, start: int) -> IntArray:
        """Confirmed tokens of `row` from position `start` on, which were added lately."""
        end = int(self.length[row])
        assert 0 <= end - start <= _NEWEST, (start, end)
        found: IntArray = self._newest[row, np.arange(start, end) % _NEWEST]
        return found
