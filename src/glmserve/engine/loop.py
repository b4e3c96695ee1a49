# SPDX-License-Identifier: Apache-2.0
"""The engine's loop: take requests in, keep the ranks busy, send tokens out. One thread.

Two plans are out at a time, more of them (up to `steps_in_flight`) while steps are so short that
two do not cover the way of a result to a plan and of that plan to the device; how long that is,
steps tell that find the device idle. The loop waits for the oldest result only when it can plan no
further. It never waits for the client.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from glmserve.engine.scheduler import Scheduler
from glmserve.messages import Cancel, Request, StepPlan, StepResult, Update, decode, encode

# Seconds of work that are kept behind the step that runs, for a result's way through three
# processes and a plan's way back: on a quiet machine, and at most where steps still came late. By
# the estimate of a step's time: where the ranks are slower than the device, more work is out.
_COVER, _MOST_COVER = 1.5e-3, 5e-3
_GROWTH = 1.2  # of the cover with each step that was late
_EASE = 1e-3  # what each other step takes of the cover's surplus
_SMOOTHING = 0.1  # weight of the newest interval between results
_LONGEST = 2 * _MOST_COVER  # that counts: long steps are seen as such, pauses do not stay


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
        self._cover = self._interval = _COVER  # the latter: seconds that a step takes, smoothed
        self._first = -1  # the newest step that none was out before: no earlier plan was possible
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
            if not self.in_flight:
                self._first = plan.step
            self.in_flight.append(plan)
        if not self.in_flight:
            if self.scheduler.idle:
                self.scheduler.check_integrity()
            return False
        result = decode(self.ranks.recv(self.step_timeout))
        assert isinstance(result, StepResult), result
        self._learn(result)
        update = self.scheduler.apply(result, self.in_flight.popleft())
        if not update.empty:
            self.emit(update)
        return True

    def _learn(self, result: StepResult) -> None:
        """How long steps take, and how much of their work must lie ahead of the device."""
        now = self.clock()
        # In the interval of a late step the device has also waited: it may only shorten.
        most = self._interval if result.late else _LONGEST
        self._interval += _SMOOTHING * (min(now - self._last_result, most) - self._interval)
        self._last_result = now
        if not result.late:
            self._cover -= _EASE * (self._cover - _COVER)
        elif result.step != self._first:
            self._cover = min(_GROWTH * self._cover, _MOST_COVER)

    def _far_enough(self) -> bool:
        """Whether no further plan is to be sent before the oldest result is here."""
        out, most = len(self.in_flight), self.scheduler.config.steps_in_flight
        return out >= most or (out >= 2 and (out - 1) * self._interval >= self._cover)
