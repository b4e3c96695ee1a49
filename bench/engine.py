# SPDX-License-Identifier: Apache-2.0
"""Engine overhead: CPU time of planning and result handling a step, over the real rings.

A fake rank in its own process reads every plan from the plan ring and answers through the result
ring with random acceptances and stops; pages turn over as sequences end and others take their
place. Only the engine's thread is timed (its CPU time, waiting excluded).

    python bench/engine.py [--rows 256] [--steps 400] [--drafts 3] [--context 1000 100000 1000000]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time

import numpy as np

from glmserve.config import PAGE_SIZE, EngineConfig
from glmserve.engine.loop import EngineLoop
from glmserve.engine.scheduler import Scheduler
from glmserve.ipc.ring import BroadcastRing
from glmserve.messages import Chunk, Request, RowOutput, StepResult, decode, encode
from glmserve.sampling_params import SamplingParams

RING = 8 << 20


def fake_rank(plans: BroadcastRing, results: BroadcastRing, drafts: int) -> None:
    """Answers plans until an empty message comes: random accepted lengths, a stop in 2000."""
    generator = random.Random(0)
    remaining: dict[int, int] = {}
    while data := plans.recv():
        plan = decode(data)
        for init in plan.admit:
            remaining[init.row] = init.remaining
        outputs = []
        finals = [chunk.row for chunk in plan.prefill if chunk.final]
        for row, most in [(r, drafts + 1) for r in plan.decode] + [(r, 1) for r in finals]:
            if remaining[row] <= 0:
                continue
            count = min(generator.randint(1, most), remaining[row])
            stopped = generator.random() < 0.0005
            remaining[row] = 0 if stopped else remaining[row] - count
            exhausted = remaining[row] == 0 and not stopped
            tokens = tuple(generator.randrange(1000) for _ in range(count))
            outputs.append(RowOutput(row, tokens, stopped, exhausted, count - 1))
        results.send(encode(StepResult(plan.step, tuple(outputs), 0)))


class Ranks:
    def __init__(self, plans: BroadcastRing, results: BroadcastRing) -> None:
        self.plans, self.results = plans, results

    def send(self, data: bytes, timeout: float | None = None) -> None:
        self.plans.send(data, timeout)

    def recv(self, timeout: float | None = None) -> bytes:
        return self.results.recv(timeout)


def measure(rows: int, steps: int, drafts: int, context: int) -> dict[str, float]:
    """Medians over `steps` steps with `rows` running rows, each of about `context` tokens."""
    pages = rows * (context // PAGE_SIZE + 70) + 64
    config = EngineConfig(
        "none", num_pages=pages, max_rows=rows, chunk=8192, drafts=drafts
    ).with_limits(1 << 21)
    plans, results = BroadcastRing.create(1, RING), BroadcastRing.create(1, RING)
    pid = os.fork()
    if pid == 0:
        reader = BroadcastRing.attach_reader(plans.fd, 0)
        fake_rank(reader, BroadcastRing.attach_writer(results.fd), drafts)
        os._exit(0)
    results = BroadcastRing.attach_reader(results.fd, 0)
    chunks: list[Chunk] = []
    scheduler = Scheduler(config, (1,))
    loop = EngineLoop(scheduler, Ranks(plans, results), chunks.extend)
    generator = np.random.default_rng(0)
    made = 0

    def fill() -> None:
        nonlocal made
        missing = rows - len(scheduler.running) - len(scheduler.waiting)
        for _ in range(missing):
            made += 1
            prompt = generator.integers(0, 1000, context).astype(np.int32)
            scheduler.add(Request(str(made), prompt, SamplingParams(max_tokens=4000)))

    times: list[float] = []
    while len(times) < steps:
        fill()  # also in place of those that have ended
        touched = list(loop.in_flight)
        start = time.thread_time()
        loop.step()
        elapsed = time.thread_time() - start
        touched += loop.in_flight
        if len(touched) > 1 and not any(plan.prefill for plan in touched):
            times.append(elapsed * 1e3)  # a pure decode step, planned and applied
    plans.send(b"")
    os.waitpid(pid, 0)
    ordered = sorted(times)
    return {
        "rows": rows,
        "context": context,
        "drafts": drafts,
        "steps": len(times),
        "median_ms": round(statistics.median(times), 3),
        "p90_ms": round(ordered[int(0.9 * len(ordered))], 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--context", type=int, nargs="+", default=[1000, 10_000, 50_000])
    args = parser.parse_args()
    for context in args.context:
        print(json.dumps(measure(args.rows, args.steps, args.drafts, context)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
