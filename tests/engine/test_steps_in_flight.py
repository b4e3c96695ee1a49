# SPDX-License-Identifier: Apache-2.0
"""How many steps the loop plans ahead: enough of them to cover the host, and no more."""

from __future__ import annotations

import numpy as np
import pytest

from glmserve.config import EngineConfig
from glmserve.engine.loop import EngineLoop
from glmserve.engine.scheduler import Scheduler
from glmserve.messages import Request, Update
from glmserve.sampling_params import SamplingParams
from tests.engine.fake_ranks import FakeRanks

TOKENS = 80


class SlowRanks(FakeRanks):
    """A result takes `seconds` of the time that `clock` tells."""

    seconds = 0.0
    now = 0.0

    def recv(self, timeout: float | None = None) -> bytes:
        self.now += self.seconds
        return super().recv(timeout)

    def clock(self) -> float:
        return self.now


def start(allowed: int) -> tuple[SlowRanks, EngineLoop, list[Update]]:
    """One request whose prompt waits."""
    config = EngineConfig("none", num_pages=8, max_rows=1, steps_in_flight=allowed)
    config = config.with_limits(400)
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
        pytest.param(0.0003, 6, 6, id="shorter-steps"),
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
    for _ in range(TOKENS // 2):
        loop.step()
    assert len(loop.in_flight) == 3
    ranks.seconds = 0.004
    out = [len(loop.in_flight) for _ in range(TOKENS // 4) if loop.step()]
    assert out[-1] == 1
