# SPDX-License-Identifier: Apache-2.0
"""How evenly tokens fall on experts and on ranks, from the totals that rank 0 reports now and then.

A layer waits for its busiest rank, so the figure is max / mean in each layer, then the mean over
the layers; 1.0 is perfect. It covers the time between the two newest reports.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from glmserve.model_config import ExpertLayout

Totals = npt.NDArray[np.int64]  # [routed layers, experts], rows that chose the expert so far


class ExpertBalance:
    def __init__(self, ranks: int, layout: ExpertLayout) -> None:
        self._ranks, self._layout = ranks, layout
        self._totals: Totals | None = None
        self.over_experts = 0.0  # busiest expert's tokens / mean; 0 = no report yet
        self.over_ranks = 0.0
        self.by_rank: tuple[int, ...] = ()  # tokens of each rank's experts, once an expert, so far

    def take(self, totals: Totals) -> None:
        """Takes a report in."""
        grown = totals if self._totals is None else totals - self._totals
        self._totals = totals
        shares = self._shares(totals)
        self.by_rank = tuple(shares.sum(0).tolist())
        busy = grown[grown.sum(1) > 0]
        if len(busy):
            self.over_experts = _imbalance(busy)
            self.over_ranks = _imbalance(self._shares(busy))

    def _shares(self, totals: Totals) -> Totals:
        """[layers, ranks]: whole experts lie on ranks in order; a sliced one is on every rank."""
        layers, experts = totals.shape
        if self._layout == "sliced":
            shares: Totals = totals.sum(1, keepdims=True).repeat(self._ranks, 1)
        else:
            shares = totals.reshape(layers, self._ranks, experts // self._ranks).sum(2)
        return shares


def _imbalance(loads: Totals) -> float:
    return float((loads.max(1) / loads.mean(1)).mean())
