# SPDX-License-Identifier: Apache-2.0
"""Engine overhead: CPU time of planning and result handling a step, over the real rings.

A fake rank in its own process reads every plan from the plan ring and answers through the result
ring with random acceptances and stops; pages turn over as rows grow, and others take the place of
those that end. Only the engine's thread is timed (its CPU time, waiting excluded), in a call of
`EngineLoop.step` as the engine process makes it; sending the update to the client is part of it.

So that a million tokens cost little to set up, all requests have the same prompt: the first one
brings it into the pages, the others find it there. Each still has its own page table, keys and
tokens, which is what a step might walk through. For `--private` lengths each has its own prompt.

    python bench/engine.py [--rows 256] [--steps 300] [--drafts 3] [--repeats 5]
        [--context 1000 20000 100000 1000000] [--private 20000] [--write]

`--write` records the figures in bench/results/engine.json.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import numpy as np

from glmserve.config import PAGE_SIZE, EngineConfig
from glmserve.engine.loop import EngineLoop
from glmserve.engine.scheduler import Scheduler
from glmserve.ipc.ring import BroadcastRing
from glmserve.messages import (
    EXHAUSTED,
    GOES_ON,
    STOPPED,
    IntArray,
    Request,
    StepPlan,
    StepResult,
    decode,
    encode,
)
from glmserve.sampling_params import SamplingParams

RESULTS = Path(__file__).parent / "results" / "engine.json"
RING = 8 << 20
STOP_RATE = 0.0005  # of rows in a step; with 256 rows one ends every eighth step
MAX_TOKENS = 4000
WARM_STEPS = 20


class FakeRank:
    """Answers plans: random accepted lengths, now and then a stop."""

    def __init__(self, rows: int, drafts: int) -> None:
        self.drafts = drafts
        self.remaining = np.zeros(rows, dtype=np.int64)
        self.generator = np.random.default_rng(0)

    def answer(self, plan: StepPlan) -> StepResult:
        for init in plan.admit:
            self.remaining[init.row] = init.remaining
        finals = [chunk.row for chunk in plan.prefill if chunk.final]
        planned = np.array(plan.decode, dtype=np.int32)
        decoding = planned[self.remaining[planned] > 0]
        rows = np.concatenate([decoding, np.array(finals, dtype=np.int32)]).astype(np.int32)
        most = np.ones(len(rows), dtype=np.int64)
        most[: len(decoding)] += self.drafts
        counts = np.minimum(self.generator.integers(1, most + 1), self.remaining[rows])
        stopped = self.generator.random(len(rows)) < STOP_RATE
        self.remaining[rows] = np.where(stopped, 0, self.remaining[rows] - counts)
        ended = np.where(self.remaining[rows] == 0, EXHAUSTED, GOES_ON)
        return StepResult(
            plan.step,
            rows,
            counts.astype(np.int32),
            self.generator.integers(0, 1000, counts.sum()).astype(np.int32),
            np.where(stopped, STOPPED, ended).astype(np.uint8),
            rows_computed=len(decoding) * (self.drafts + 1),
        )


def run_rank(plans: BroadcastRing, results: BroadcastRing, rows: int, drafts: int) -> None:
    """Answers until an empty message comes."""
    rank = FakeRank(rows, drafts)
    while data := plans.recv():
        results.send(encode(rank.answer(decode(data))))


def drain(connection: Connection) -> None:
    """The client: takes the updates and forgets them."""
    while connection.recv_bytes():
        pass


class Engine:
    """The loop with a fake rank and a client behind it, each a process of its own."""

    def __init__(self, config: EngineConfig) -> None:
        plans, results = BroadcastRing.create(1, RING), BroadcastRing.create(1, RING)
        ours, theirs = Pipe()
        self.children = []
        jobs: tuple[Callable[[], None], ...] = (
            lambda: run_rank(
                BroadcastRing.attach_reader(plans.fd, 0),
                BroadcastRing.attach_writer(results.fd),
                config.max_rows,
                config.drafts,
            ),
            lambda: drain(theirs),
        )
        for job in jobs:
            pid = os.fork()
            if pid == 0:
                move_to(-1)
                job()
                os._exit(0)
            self.children.append(pid)
        move_to(0)
        self.plans, self.client = plans, ours
        self.results = BroadcastRing.attach_reader(results.fd, 0)
        self.scheduler = Scheduler(config, (1,))
        self.loop = EngineLoop(self.scheduler, self, ours.send)
        self.made = 0

    def send(self, data: bytes, timeout: float | None = None) -> None:
        self.plans.send(data, timeout)

    def recv(self, timeout: float | None = None) -> bytes:
        return self.results.recv(timeout)

    def submit(self, prompt: IntArray) -> None:
        self.made += 1
        sampling = SamplingParams(max_tokens=MAX_TOKENS)
        self.loop.take([Request(str(self.made), prompt, sampling)])

    def timed_step(self) -> float | None:
        """Milliseconds of a step; None unless it only decodes."""
        touched = list(self.loop.in_flight)
        start = time.thread_time()
        self.loop.step()
        elapsed = time.thread_time() - start
        touched += self.loop.in_flight
        if len(touched) < 2 or any(plan.prefill for plan in touched):
            return None
        return elapsed * 1e3

    def close(self) -> None:
        while self.loop.in_flight:
            self.recv(10.0)
            self.loop.in_flight.popleft()
        self.plans.send(b"")
        self.client.send_bytes(b"")
        for pid in self.children:
            os.waitpid(pid, 0)


def move_to(which: int) -> None:
    """Keeps this process on one of the cores that it may use: 0 the first, -1 the last."""
    os.sched_setaffinity(0, {CORES[which]})


CORES = sorted(os.sched_getaffinity(0))


def measure(rows: int, steps: int, drafts: int, context: int, private: bool) -> dict[str, Any]:
    """Times `steps` steps in which `rows` running rows, each of `context` tokens, decode."""
    prompts = rows if private else 1
    pages = prompts * (context // PAGE_SIZE) + (rows + 8) * (MAX_TOKENS // PAGE_SIZE + 4)
    settings = EngineConfig("none", num_pages=pages, max_rows=rows, chunk=8192, drafts=drafts)
    engine = Engine(settings.with_limits(1 << 21))
    generator = np.random.default_rng(0)

    def draw() -> IntArray:
        return generator.integers(0, 1000, context).astype(np.int32)

    shared = draw()
    engine.submit(shared)
    while not engine.scheduler.snapshot().generated_tokens:
        engine.loop.step()
    gc.collect()
    gc.freeze()  # as the engine process does once it has loaded
    times: list[float] = []
    while len(times) < steps + WARM_STEPS:
        stats = engine.scheduler.snapshot()
        for _ in range(rows - stats.running - stats.waiting):
            engine.submit(draw() if private else shared)
        elapsed = engine.timed_step()
        if elapsed is not None and engine.scheduler.snapshot().running == rows:
            times.append(elapsed)
    engine.close()
    gc.unfreeze()
    ordered = sorted(times[WARM_STEPS:])
    return {
        "rows": rows,
        "drafts": drafts,
        "context": context,
        "prompts": "private" if private else "shared",
        "steps": len(ordered),
        "min_ms": round(ordered[0], 3),
        "median_ms": round(statistics.median(ordered), 3),
        "p90_ms": round(ordered[int(0.9 * len(ordered))], 3),
        "max_ms": round(ordered[-1], 3),
    }


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")), "?")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--context", type=int, nargs="+", default=[1000, 20000, 100_000, 1_000_000])
    parser.add_argument("--private", type=int, nargs="*", default=[20000])
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    figures = []
    points = [(n, False) for n in args.context] + [(n, True) for n in args.private]
    for repeat in range(args.repeats):  # the points in turn: a busy minute hits all of them
        for context, private in points:
            figure = measure(args.rows, args.steps, args.drafts, context, private)
            figures.append(figure | {"repeat": repeat})
            print(json.dumps(figures[-1]), flush=True)
    summary = []
    for context, private in points:
        prompts = "private" if private else "shared"
        found = [f for f in figures if (f["context"], f["prompts"]) == (context, prompts)]
        medians = [f["median_ms"] for f in found]
        summary.append(
            {
                "context": context,
                "prompts": prompts,
                "median_ms": round(statistics.median(medians), 3),
                "best_median_ms": min(medians),
                "min_ms": min(f["min_ms"] for f in found),
            }
        )
        print(json.dumps(summary[-1]))
    if args.write:
        record = {
            "cpu": cpu_name(),
            "python": platform.python_version(),
            "numpy": np.__version__,
            "date": datetime.date.today().isoformat(),
            "load_average": round(load, 2),
            "command": " ".join(["python", *sys.argv]),
            "summary": summary,
            "figures": figures,
        }
        RESULTS.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
