# SPDX-License-Identifier: Apache-2.0
"""What host planning adds to a step, without a GPU: the whole engine over a pretended device.

Client, engine and rank are the real processes over the real rings; of the rank only the replay of a
captured step is pretended: it takes a fixed time, begins when the one before it ends and not before
it is launched, as on a GPU's stream, and makes up tokens. So what the device stands idle between
two steps is known exactly, whoever else is on the machine; overhead is that over the steps' time.

    python bench/pace.py [--ms 0.36 1 5] [--rows 1 8 64] [--drafts 0 5] [--busy 0] [--seconds 1.5]

`--busy` processes spin beside it, each a session of its own. On a machine that others use,
`chrt -r 1 python bench/pace.py` shows what a quiet one would.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from glmserve.checkpoint.synthetic import make_checkpoint
from glmserve.config import PAGE_SIZE, EngineConfig
from glmserve.engine import client, process
from glmserve.ipc.process import spawn
from glmserve.ipc.ring import BroadcastRing
from glmserve.kernels.row_state import columns
from glmserve.messages import Request, StepPlan
from glmserve.parallel.launcher import RankLauncher
from glmserve.runtime import rank
from glmserve.runtime.graphs import Captured, Head, Step
from glmserve.runtime.packing import Layout, Places, Shape, buckets, pack
from glmserve.runtime.result_sender import ResultSender
from glmserve.runtime.results import Pending
from glmserve.runtime.step import StepRunner
from glmserve.runtime.variants import ALL_VARIANTS
from glmserve.sampling_params import SamplingParams

PROMPT = 200
MIXED_ROWS = (64, 128, 256, 512, 1024, 2048, 4096)
MOST_STEPS = 1 << 17
SETTLE = 0.2  # seconds in which the loop learns how long steps are
RECORD = np.dtype([("launched", "f8"), ("start", "f8"), ("end", "f8"), ("prompts", "?")])
CONTEXT = 1 << 20  # of the checkpoint: streams run to the end of the window


class End:
    """Stands in for the event behind a step."""

    def __init__(self, at: float) -> None:
        self.at = at

    def query(self) -> bool:
        return time.monotonic() >= self.at

    def synchronize(self) -> None:
        while (left := self.at - time.monotonic()) > 0:
            time.sleep(left)


class Device:
    """A stream whose steps all take `seconds`; it writes down when they ran."""

    def __init__(self, seconds: float, records: str) -> None:
        self.seconds = seconds
        self.records = np.memmap(records, RECORD, "r+")
        self.steps, self.end = 0, 0.0

    def launch(self, prompts: bool) -> None:
        now = time.monotonic()
        start = max(now, self.end)
        self.end = start + self.seconds
        self.records[self.steps] = (now, start, self.end, prompts)
        self.steps += 1


class Graph:
    """Stands in for a captured step of one shape."""

    def __init__(self, runner: StepRunner, device: Device, shape: Shape, layout: Layout) -> None:
        self.runner, self.device, self.mixed = runner, device, shape.mixed
        self.sequences, self.table = layout.sequences.numpy(), runner.state.table.numpy()
        self.lines = torch.zeros(
            len(self.sequences), columns.result_width(runner.config.drafts), dtype=torch.int32
        )

    def replay(self) -> None:
        """One token a living row, whose remaining ones are counted; no draft is accepted."""
        rows, table, lines = self.sequences[:, columns.ROW], self.table, self.lines.numpy()
        ends = self.sequences[:, columns.PROMPT_END] >= 0
        draws = (table[rows, columns.ACTIVE] == 1) & (self.sequences[:, columns.FIRST_ROW] >= 0)
        draws |= ends
        alive = rows[draws]
        table[alive, columns.REMAINING] -= 1
        going = table[alive, columns.REMAINING] > 0
        table[alive, columns.ACTIVE] = going
        lines[:, columns.COUNT] = draws
        lines[draws, columns.FLAGS] = np.where(going, 0, columns.EXHAUSTED)
        self.runner.slots.send(self.lines)
        self.device.launch(self.mixed)


def pretend(runner: StepRunner, device: Device) -> None:
    """Lets the runner replay steps of every shape on `device`."""
    config, state = runner.config, runner.state
    width, nothing = config.drafts + 1, StepPlan(0)
    shapes = [Shape(size * width, size, mixed=False) for size in buckets(config.max_rows)]
    shapes += [Shape(rows, min(rows, config.max_rows), mixed=True) for rows in MIXED_ROWS]
    for shape in shapes:
        layout = pack(nothing, Places.of(nothing, config.drafts, shape), state, None)
        graph: Any = Graph(runner, device, shape, layout)
        step = Step(graph, state.no_tokens, shape.sequences)
        head = Head(graph, torch.empty(0), torch.empty(0))
        runner.graphs.shapes[shape] = Captured(
            layout, dict.fromkeys(ALL_VARIANTS, step), head, step
        )


def run_rank(seconds: str, records: str) -> int:
    """The rank's program: loads the checkpoint on the CPU and runs nothing of it."""
    device, build = Device(float(seconds), records), rank.build

    def build_pretended(config: EngineConfig, *rest: Any) -> Any:
        runner, ready = build(replace(config, num_pages=2), *rest)  # nothing is kept in pages
        pretend(runner, device)
        return runner, ready

    def mark(pending: Pending, _device: torch.device) -> None:
        vars(pending).update(done=End(device.end))

    def sender(ring: BroadcastRing, threaded: bool) -> ResultSender:
        return ResultSender(ring, threaded=True)  # not threaded, a rank waits for its device

    with (
        mock.patch.object(rank, "build", build_pretended),
        mock.patch.object(rank, "ResultSender", sender),
        mock.patch.object(Pending, "mark", mark),
    ):
        return rank.main()


def run_engine(*device: str) -> int:
    """The engine's program."""
    launcher = partial(RankLauncher, program=(__file__, "rank", *device))
    with mock.patch.object(process, "RankLauncher", launcher):
        return process.main()


@contextmanager
def spinning(count: int) -> Iterator[None]:
    """Other work on the machine: so many processes that never sleep."""
    argv = ["timeout", "60", sys.executable, "-S", "-c", "while True: pass"]
    children = [subprocess.Popen(argv, start_new_session=True) for _ in range(count)]
    try:
        yield
    finally:
        for child in children:
            child.terminate()
            child.wait()


def measure(
    checkpoint: Path, rows: int, drafts: int, seconds: float, busy: int, window: float
) -> dict[str, Any]:
    """`rows` streams that decode for `window` seconds."""
    tokens = rows + int((window + 60 * SETTLE) / seconds)
    pages = -(-(PROMPT + tokens + 64) // PAGE_SIZE) + 1
    config = EngineConfig(
        str(checkpoint),
        num_pages=rows * pages + 1,
        max_rows=rows,
        drafts=drafts,
        max_model_len=PROMPT + tokens,
    )
    with tempfile.NamedTemporaryFile() as file:
        records = np.memmap(file.name, RECORD, "w+", shape=(MOST_STEPS,))

        def spawn_pretended(argv: list[str], **rest: Any) -> Any:
            return spawn([argv[0], __file__, "engine", str(seconds), file.name, argv[-1]], **rest)

        with mock.patch.object(client, "spawn", spawn_pretended):
            engine = client.EngineClient.start(config)
        generator = np.random.default_rng(1)
        for row in range(rows):
            prompt = generator.integers(0, 1000, PROMPT).astype(np.int32)
            sampling = SamplingParams(max_tokens=tokens, temperature=0.8, seed=row, ignore_eos=True)
            engine.submit(Request(str(row), prompt, sampling))
        running: set[str] = set()
        try:
            while len(running) < rows:
                running |= {chunk.uid for chunk in engine.receive(60.0)}
            with spinning(busy):
                begin = time.monotonic() + SETTLE
                while time.monotonic() < begin + window:
                    ended = [chunk for chunk in engine.receive(60.0) if chunk.finish_reason]
                    assert not ended, ended
        finally:
            engine.close()
        found = np.array(records)
    inside = found[(found["launched"] > begin) & (found["launched"] < begin + window)]
    assert not inside["prompts"].any()
    idle = inside["start"][1:] - inside["end"][:-1]
    first = np.searchsorted(inside["end"], inside["launched"])
    out = np.arange(len(inside)) - first  # launched before it and not ended
    return {
        "ms": seconds * 1e3,
        "rows": rows,
        "drafts": drafts,
        "busy": busy,
        "overhead_percent": round(100 * float(idle.sum()) / (len(idle) * seconds), 1),
        "late_percent": round(100 * float((idle > 0).mean()), 1),
        "ahead": round(float(out.mean()), 1),
        "steps": len(inside),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ms", type=float, nargs="+", default=[0.36, 1, 5])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 5])
    parser.add_argument("--busy", type=int, nargs="+", default=[0])
    parser.add_argument("--seconds", type=float, default=1.5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = Path(directory)
        make_checkpoint(checkpoint, "tiny", 3)
        config = json.loads((checkpoint / "config.json").read_text())
        config["max_position_embeddings"] = CONTEXT
        (checkpoint / "config.json").write_text(json.dumps(config))
        for ms in args.ms:
            for busy in args.busy:
                for drafts in args.drafts:
                    for rows in args.rows:
                        point = (rows, drafts, ms / 1e3, busy, args.seconds)
                        print(json.dumps(measure(checkpoint, *point)), flush=True)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] in (["engine"], ["rank"]):
        name, *device = sys.argv[1:4]
        del sys.argv[1:4]  # what is left is the program's own
        sys.exit((run_engine if name == "engine" else run_rank)(*device))
    sys.exit(main())
