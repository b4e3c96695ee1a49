# SPDX-License-Identifier: Apache-2.0
"""Counts of what the engine did, for the server's metrics and `glmserve generate --json`.

Counters only grow; gauges are read off the scheduler when a snapshot is taken. Times that a
client sees (first token, between tokens) are measured where responses leave, not here.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from glmserve.config import EngineConfig
from glmserve.engine.expert_balance import ExpertBalance
from glmserve.engine.page_pool import PagePool
from glmserve.messages import EngineStats, StepPlan, StepResult


class StatsCollector:
    """One for an engine; the loop's thread owns it."""

    def __init__(self, config: EngineConfig) -> None:
        self._drafts = drafts = config.drafts
        self._balance = ExpertBalance(config.ranks, config.expert_layout)
        self.steps = 0
        self._rows = 0
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._generated = 0
        self._drafted = 0
        self._rows_by_count = np.zeros(drafts + 2, dtype=np.int64)  # tokens that a step confirmed
        self._finished: Counter[str] = Counter()

    def arrived(self, prompt_tokens: int) -> None:
        self._prompt_tokens += prompt_tokens

    def admitted(self, cached_tokens: int) -> None:
        self._cached_tokens += cached_tokens

    def finished(self, reason: str) -> None:
        self._finished[reason] += 1

    def stepped(self, plan: StepPlan, result: StepResult) -> None:
        """Takes in one executed step."""
        self.steps += 1
        self._rows += result.rows_computed
        self._generated += len(result.tokens)
        if result.expert_totals is not None:
            self._balance.take(result.expert_totals)
        # A final prefill draws one token and has no drafts.
        self._drafted += self._drafts * (
            len(result.rows) - sum(chunk.final for chunk in plan.prefill)
        )
        self._rows_by_count += np.bincount(result.counts, minlength=self._drafts + 2)

    def snapshot(self, running: int, waiting: int, pool: PagePool, preemptions: int) -> EngineStats:
        # Rows with p + 2 tokens or more have accepted the draft at position p.
        accepted = self._rows_by_count[::-1].cumsum()[::-1][2:]
        return EngineStats(
            steps=self.steps,
            rows=self._rows,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=self._generated,
            drafted_tokens=self._drafted,
            accepted_by_position=tuple(accepted.tolist()),
            preemptions=preemptions,
            finished=dict(self._finished),
            running=running,
            waiting=waiting,
            pages=pool.capacity,
            free_pages=pool.free,
            expert_imbalance=self._balance.over_experts,
            rank_imbalance=self._balance.over_ranks,
            expert_tokens_by_rank=self._balance.by_rank,
        )
