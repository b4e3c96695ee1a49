# SPDX-License-Identifier: Apache-2.0
"""Chunks say how long their request waited for a row."""

from __future__ import annotations

from tests.engine.test_scheduler import Harness, make_request, prompt_of


def test_queue_time_ends_when_the_request_gets_a_row() -> None:
    engine = Harness(max_rows=1)
    engine.loop.take([make_request(uid, prompt_of(8, 1), 4) for uid in ("first", "second")])
    while engine.loop.step():
        engine.now += 0.25
        engine.loop.take([])
    queued = {uid: {c.queued for c in engine.chunks if c.uid == uid} for uid in ("first", "second")}
    assert queued == {"first": {0.0}, "second": {1.0}}  # the four steps of the first one
