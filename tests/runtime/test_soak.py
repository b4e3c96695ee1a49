# SPDX-License-Identifier: Apache-2.0
"""Thousands of random requests through the real engine: nothing is left, nothing grows."""

from __future__ import annotations

import random
import time
from pathlib import Path

import numpy as np
import pytest

from glmserve.checkpoint.synthetic import make_checkpoint
from glmserve.config import EngineConfig
from glmserve.engine.client import EngineClient
from glmserve.errors import InvalidInput
from glmserve.messages import Request
from glmserve.sampling_params import SamplingParams

pytestmark = pytest.mark.slow

ALIVE = 64  # requests at a time


def resident_bytes(pids: list[int]) -> int:
    return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 for pid in pids)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("ranks", "count", "pages"), [(1, 10_000, 40), (8, 500, 20)])
def test_no_page_or_request_is_left_after_many(
    tmp_path: Path, ranks: int, count: int, pages: int
) -> None:
    make_checkpoint(tmp_path, "tiny", 7)
    # Few pages, so that requests preempt each other.
    config = EngineConfig(str(tmp_path), ranks=ranks, num_pages=pages, max_rows=32, drafts=1)
    generator = random.Random(0)
    client = EngineClient.start(config)
    pids = [client.info.engine_pid, *client.info.rank_pids]
    running: set[str] = set()
    ended: dict[str, int] = {}
    refused = sent = 0
    sizes: list[int] = []

    def submit(number: int) -> None:
        nonlocal refused
        length = generator.choice((1, 3, 10, 64, 65, 90))
        bad = generator.random() < 0.05
        prompt = np.asarray(
            [2000 if bad else generator.randrange(900) for _ in range(length)], dtype=np.int32
        )
        sampling = SamplingParams(
            max_tokens=generator.choice((1, 2, 4, 8, 70)),
            temperature=generator.choice((0.0, 1.0)),
            ignore_eos=generator.random() < 0.5,
            presence_penalty=generator.choice((0.0, 0.5)),
        )
        try:
            client.submit(Request(str(number), prompt, sampling))
            running.add(str(number))
        except InvalidInput:
            refused += 1
        if running and generator.random() < 0.1:
            client.cancel(generator.choice(sorted(running)))

    deadline = time.monotonic() + 840
    try:
        while sent < count or running:
            assert time.monotonic() < deadline, (sent, len(running))
            while sent < count and len(running) < ALIVE:
                submit(sent)
                sent += 1
                if sent % (count // 10) == 0:
                    sizes.append(resident_bytes(pids))
            for chunk in client.receive(30.0):
                if chunk.finish_reason:
                    running.remove(chunk.uid)
                    ended[chunk.finish_reason] = ended.get(chunk.finish_reason, 0) + 1
        deadline = time.monotonic() + 10
        # Pages of the last sequences follow when no step in flight names them; a leak never does.
        while (
            (stats := client.stats) is None
            or stats.running
            or stats.waiting
            or stats.free_pages < stats.pages
        ):
            assert time.monotonic() < deadline, stats
            time.sleep(0.05)
    finally:
        client.close()
    assert stats.free_pages == stats.pages
    assert stats.preemptions > 0
    assert set(ended) == {"stop", "length", "abort"}
    assert refused > 0 and sum(ended.values()) + refused == count
    # Flat over the second half, but for what an allocator holds back.
    assert sizes[-1] <= sizes[len(sizes) // 2] * 1.05, sizes
    for pid in pids:
        assert not Path(f"/proc/{pid}").exists()
