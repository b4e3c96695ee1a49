# SPDX-License-Identifier: Apache-2.0
"""Applies the engine's grammar masks to the logits of a step's drawing rows, first of all.

The masks arrive while the forward pass runs and are fetched when it is done. What a grammar is,
the ranks do not know.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import numpy as np
from torch import Tensor

from glmserve.kernels.logit_shaping import shut_ids
from glmserve.messages import IntArray, RowInit, StepMasks
from glmserve.runtime.uploads import upload


class GrammarMasks:
    """Knows which rows have a grammar, and this rank's columns of a mask."""

    def __init__(self, ids: Tensor, fetch: Callable[[], StepMasks]) -> None:
        """ids [width] int64: token ids of this shard. `fetch` waits for the next message."""
        self._fetch = fetch
        self._first = int(ids[0])
        self._words = slice(self._first >> 5, int(ids[-1] >> 5) + 1)
        self._rows: set[int] = set()

    def admit(self, init: RowInit) -> None:
        """Notes whether the row's new sequence has a grammar."""
        self._rows.discard(init.row)
        if init.grammar:
            self._rows.add(init.row)

    @property
    def rows(self) -> Collection[int]:
        """Device rows that have a grammar."""
        return self._rows

    def receive(self, step: int) -> dict[int, IntArray]:
        """Masks of the step by row: [n, words] int32, on the host."""
        found: dict[int, IntArray] = {}
        while True:
            part = self._fetch()
            assert isinstance(part, StepMasks) and part.step == step, (part, step)
            for row, mask in zip(part.rows, part.masks, strict=True):
                found[row] = mask.view(np.int32)
            if not part.more:
                return found

    def apply_(
        self,
        logits: Tensor,
        places: Mapping[int, tuple[int, int]],
        masks: Mapping[int, IntArray],
    ) -> None:
        """-inf, in place, where a mask's bit is 0: logits [M, width] of the drawing rows.

        places: device row -> (its first drawing row, how many)
        """
        chosen: list[int] = []
        bits: list[IntArray] = []
        for row, mask in masks.items():
            start, width = places[row]
            count = min(width, len(mask))  # later ones are not reached
            chosen += range(start, start + count)
            bits.append(mask[:count, self._words])
        if chosen:
            arrays = [np.array(chosen, dtype=np.int32), np.concatenate(bits)]
            where, allowed = upload(arrays, logits.device)
            shut_ids(logits, where, allowed, self._first, self._words.start)
