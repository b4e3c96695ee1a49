# SPDX-License-Identifier: Apache-2.0
"""Which parts of sampling a step needs, from what its rows asked for when they came.

The host knows this before the step runs, so it chooses what is launched; what a row does not ask
for changes nothing in its draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from glmserve.runtime.logit_shaping import LogitShaping
from glmserve.runtime.sampler import Sampler


@dataclass(frozen=True)
class Variant:
    shaped: bool  # penalties, biases, bad words, allowed ids or min_tokens
    limited: bool  # top-k, top-p or min-p

    @classmethod
    def of(cls, rows: Sequence[int], shaping: LogitShaping, sampler: Sampler) -> Variant:
        """What the device rows ask for."""
        shaped = shaping.wanted(rows)
        return cls(shaped, shaped or sampler.limited(rows))


ALL_VARIANTS = (Variant(False, False), Variant(False, True), Variant(True, True))
EVERYTHING = ALL_VARIANTS[-1]
