# SPDX-License-Identifier: Apache-2.0
"""What requests went through, noted by the sender thread and read by the metrics thread.

Noting costs a few list operations and never waits. Counts only grow, so that a reader on another
thread sees a state that was true a moment ago. Not its job: the server's metrics (`metrics.py`).
"""

from __future__ import annotations

import queue
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from glmserve.server.metric_table import METRICS

_BOUNDS = {metric.name: metric.bounds for metric in METRICS}


class Intervals:
    """Counts of values by bucket; bucket i holds values <= bounds[i], the last one the rest."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def add(self, value: float, times: int) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


class Times:
    """When things happened to one request, in time.monotonic() seconds."""

    __slots__ = ("arrived", "newest", "queued", "tokens")

    def __init__(self, arrived: float) -> None:
        self.arrived = arrived
        self.newest = 0.0  # when its newest tokens came; 0 = none yet
        self.tokens = 0
        self.queued = 0.0  # seconds in the engine's queue


class Observations:
    """Everything that is counted where responses leave; the engine counts the rest."""

    def __init__(self) -> None:
        self.finished: Counter[str] = Counter()
        self.per_token = Intervals(_BOUNDS["inter_token_latency_seconds"])
        self.per_step = Intervals(_BOUNDS["inter_step_latency_seconds"])
        # (histogram, value), as they came
        self.values: queue.SimpleQueue[tuple[str, float]] = queue.SimpleQueue()

    def tokens(self, times: Times, count: int, queued: float, now: float) -> None:
        """A step has brought `count` tokens of a request."""
        if times.newest:
            elapsed = now - times.newest
            self.per_step.add(elapsed, 1)
            self.per_token.add(elapsed / count, count)
        else:
            self.values.put(("time_to_first_token_seconds", now - times.arrived))
            times.queued = queued
            # Tokens after the first that came with it took no time.
            if count > 1:
                self.per_token.add(0.0, count - 1)
        times.newest = now
        times.tokens += count

    def ended(self, times: Times, prompt_tokens: int, reason: str, now: float) -> None:
        """A request has had its last response."""
        self.finished[reason] += 1
        self.values.put(("e2e_request_latency_seconds", now - times.arrived))
        self.values.put(("request_prompt_tokens", prompt_tokens))
        self.values.put(("request_generation_tokens", times.tokens))
        if times.newest:
            self.values.put(("request_queue_time_seconds", times.queued))
