# SPDX-License-Identifier: Apache-2.0
"""How many steps the loop plans ahead: enough of them to cover the host, and no more."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from glmserve.config import EngineConfig
from glmserve.engine.loop import EngineLoop
from glmserve.engine.scheduler import Scheduler
from glmserve.messages import Request, Update, decode, encode
from glmserve.sampling_params import SamplingParams
from tests.engine.fake_ranks import FakeRanks

TOKENS = 400


class SlowRanks(FakeRanks):
    """A result takes `seconds` of the time that `clock` tells, or `idle` more, then being late."""

    seconds = 0.0
    idle = 0.0
    now = 0.0

    def recv(self, timeout: float | None = None) -> bytes:
        self.now += self.seconds + self.idle
        result = decode(super().recv(timeout))
        return encode(dataclasses.replace(result, late=self.idle > 0))

    def clock(self) -> float:
        return self.now


def start(allowed: int) -> tuple[SlowRanks, EngineLoop, list[Update]]:
    """One request whose prompt waits."""
    config = EngineConfig("none", num_pages=10, max_rows=1, steps_in_flight=allowed)
    config = config.with_limits(500)
    ranks, updates = SlowRanks(config), list[Update]()
    loop = EngineLoop(Scheduler(config, (96,)), ranks, updates.append, clock=ranks.clock)
    sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    loop.take([Request("a", np.arange(5, dtype=np.int32), sampling)])
    return ranks, loop, updates


@pytest.mark.parametrize(
    ("seconds", "allowed", "want"),
    [
        pytest.param(0.004, 4, 2, id="long-steps"),
        pytest.param(0.0006, 6, 4, id="short-steps"),
        pytest.param(0.0004, 16, 5, id="shorter-steps"),
        pytest.param(0.00005, 16, 16, id="shorter-steps-limited"),
        pytest.param(0.0, 2, 2, id="short-steps-limited"),
        pytest.param(0.0, 1, 1, id="one-at-a-time"),
    ],
)
def test_short_steps_are_planned_further_ahead(seconds: float, allowed: int, want: int) -> None:
    ranks, loop, updates = start(allowed)
    ranks.seconds = seconds
    out = [len(loop.in_flight) for _ in iter(loop.step, False)]
    assert max(out) == want - 1  # one result has come when a step returns
    assert sum(len(update.tokens) for update in updates) == TOKENS


def test_long_steps_after_short_ones_are_planned_two_ahead_again() -> None:
    ranks, loop, _ = start(4)
    for _ in range(40):
        loop.step()
    assert len(loop.in_flight) == 3
    ranks.seconds = 0.004
    assert out_after(loop, 20) == 2


def out_after(loop: EngineLoop, steps: int) -> int:
    """Plans that are out when the loop has made so many steps more and waits for a result."""
    for _ in range(steps):
        assert loop.step()
    return len(loop.in_flight) + 1


def test_steps_that_come_late_are_planned_further_ahead_until_they_no_longer_do() -> None:
    ranks, loop, _ = start(16)
    ranks.seconds = 0.0005
    assert out_after(loop, 60) == 4
    ranks.idle = 0.003  # the time between results says nothing about the steps
    assert out_after(loop, 1) == 4  # what is late was planned before
    assert out_after(loop, 10) == 11
    assert out_after(loop, 10) == 11
    ranks.idle = 0.0
    assert 4 < out_after(loop, 200) < 11


def test_long_steps_that_come_late_are_planned_two_ahead_all_the_same() -> None:
    ranks, loop, _ = start(16)
    ranks.seconds = 0.006
    assert out_after(loop, 40) == 2
    ranks.idle = 0.006
    assert out_after(loop, 40) == 2


def test_a_step_that_nothing_was_out_before_may_find_the_device_idle() -> None:
    ranks, loop, _ = start(16)
    ranks.seconds, ranks.idle = 0.0005, 0.1
    loop.step()
    ranks.idle = 0.0
    assert out_after(loop, 60) == 4
