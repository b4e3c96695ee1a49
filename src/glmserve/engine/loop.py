# SPDX-License-Identifier: Apache-2.0
"""The engine's loop: take requests in, keep the ranks busy, send tokens out. One thread.

Two plans are out at a time, more of them (up to `steps_in_flight`) while steps are so short that
two do not cover the way of a result to a plan and of that plan to the device. The loop waits for
the oldest result only when it can plan no further. It never waits for the client.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from glmserve.engine.scheduler import Scheduler
from glmserve.messages import Cancel, Request, StepPlan, StepResult, Update, decode, encode

# Seconds of work that are kept behind the step that runs: a result's way through three processes,
# and a plan's way back, take up to so long on a machine with idle cores.
_COVER = 1.5e-3
_SMOOTHING = 0.1  # weight of the newest interval between results
_LONGEST = 2 * _COVER  # that counts: pauses say nothing, and long steps must be seen as such again


class Ranks(Protocol):
    """The ranks as the loop sees them (parallel.launcher.RankLauncher, or a fake in tests)."""

    def send(self, data: bytes, timeout: float | None = None) -> None: ...

    def recv(self, timeout: float | None = None) -> bytes: ...


class EngineLoop:
    """Drives a scheduler. `emit` gets the updates of steps and cancels, in order."""

    def __init__(
        self,
        scheduler: Scheduler,
        ranks: Ranks,
        emit: Callable[[Update], None],
        step_timeout: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.ranks = ranks
        self.emit = emit
        self.step_timeout = step_timeout  # seconds a step may take before the ranks are given up
        self.clock = clock  # seconds; never goes back
        self.in_flight: deque[StepPlan] = deque()
        self._interval = _COVER  # seconds between results, smoothed
        self._last_result = 0.0

    def take(self, messages: Iterable[Request | Cancel]) -> None:
        """Queues requests, applies cancels and deadlines. Called before every step."""
        now = self.clock()
        ended = self.scheduler.expire(now)
        for message in messages:
            if isinstance(message, Cancel):
                ended += self.scheduler.cancel(message.uid)
            elif (refusal := self.scheduler.add(message, now)) is not None:
                ended.append(refusal)
        if ended:
            self.emit(Update(ended=tuple(ended)))

    def step(self) -> bool:
        """Plans what can be planned and applies one result; False when there is nothing to do."""
        while not self._far_enough():
            plan = self.scheduler.schedule()
            if plan is None:
                break
            self.ranks.send(encode(plan), self.step_timeout)
            if plan.masks_follow:  # made while the ranks run the forward pass
                for masks in self.scheduler.masks(plan):
                    self.ranks.send(encode(masks), self.step_timeout)
            self.in_flight.append(plan)
        if not self.in_flight:
            if self.scheduler.idle:
                self.scheduler.check_integrity()
            return False
        result = decode(self.ranks.recv(self.step_timeout))
        assert isinstance(result, StepResult), result
        now = self.clock()
        self._interval += _SMOOTHING * (min(now - self._last_result, _LONGEST) - self._interval)
        self._last_result = now
        update = self.scheduler.apply(result, self.in_flight.popleft())
        if not update.empty:
            self.emit(update)
        return True

    def _far_enough(self) -> bool:
        """Whether no further plan is to be sent before the oldest result is here."""
        out, most = len(self.in_flight), self.scheduler.config.steps_in_flight
        return out >= most or (out >= 2 and (out - 1) * self._interval >= _COVER)
