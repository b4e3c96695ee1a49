# SPDX-License-Identifier: Apache-2.0
"""Applies the engine's grammar masks to the logits of a step's drawing rows, first of all.

The masks arrive while the forward pass runs and are fetched when it is done. What a grammar is,
the ranks do not know.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping

import numpy as np
import torch
from torch import Tensor

from glmserve.messages import RowInit, StepMasks


class GrammarMasks:
    """Knows which rows have a grammar, and this rank's columns of a mask."""

    def __init__(self, ids: Tensor, fetch: Callable[[], StepMasks]) -> None:
        """ids [width] int64: token ids of this shard. `fetch` waits for the next message."""
        self._fetch = fetch
        self._word, self._bit = ids >> 5, (ids & 31).to(torch.int32)
        self._rows: set[int] = set()

    def admit(self, init: RowInit) -> None:
        """Notes whether the row's new sequence has a grammar."""
        self._rows.discard(init.row)
        if init.grammar:
            self._rows.add(init.row)

    @property
    def rows(self) -> Container[int]:
        """Device rows that have a grammar."""
        return self._rows

    def receive(self, step: int) -> dict[int, Tensor]:
        """Masks of the step by row: [n, words] int32."""
        found: dict[int, Tensor] = {}
        while True:
            part = self._fetch()
            assert isinstance(part, StepMasks) and part.step == step, (part, step)
            for row, mask in zip(part.rows, part.masks, strict=True):
                found[row] = torch.from_numpy(mask.view(np.int32)).to(self._word.device)
            if not part.more:
                return found

    def apply(
        self,
        logits: Tensor,
        places: Mapping[int, tuple[int, int]],
        masks: Mapping[int, Tensor],
    ) -> Tensor:
        """-inf where a mask's bit is 0: logits [M, width] of the drawing rows.

        places: device row -> (its first drawing row, how many)
        """
        allowed = torch.ones_like(logits, dtype=torch.bool)
        for row, mask in masks.items():
            start, width = places[row]
            count = min(width, len(mask))  # later ones are not reached
            allowed[start : start + count] = ((mask[:count, self._word] >> self._bit) & 1) > 0
        return logits.masked_fill(~allowed, -torch.inf)
