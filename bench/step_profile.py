# SPDX-License-Identifier: Apache-2.0
"""Decode steps of one rank on this GPU: times captured, eager and under the engine, and what runs.

For the block preset (or --checkpoint), each number of drafts and each bucket of rows: the time of a
replayed step, of the same step launched eagerly, and of a step while the whole engine plans it (the
shortest of a few runs); the kernels of a replay by name, the gaps inside it and between replays,
and what a layer of each kind takes. Writes bench/results/step.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from glmserve.checkpoint.quantiser import FORMATS
from glmserve.checkpoint.synthetic import make_checkpoint
from glmserve.config import PAGE_SIZE, EngineConfig
from glmserve.engine.client import EngineClient
from glmserve.engine.process import resolve
from glmserve.ipc.ring import BroadcastRing
from glmserve.messages import PageGrant, PrefillChunk, Request, RowInit, StepPlan
from glmserve.parallel.group import SingleGroup
from glmserve.runtime.kernel_split import operators
from glmserve.runtime.rank import build
from glmserve.runtime.step import StepRunner
from glmserve.sampling_params import SamplingParams

RESULTS = ROOT / "bench" / "results" / "step.json"
PROMPT = 200
STEPS = 60
RUNS = 3  # of each time; the shortest counts
PROFILED = 3  # steps whose kernels are listed
AHEAD = 2  # steps launched before those, so that the host is ahead of the device
LAYER_MARK = "split_norm_write"  # a kernel that runs once a layer


def settings(checkpoint: Path, rows: int, drafts: int) -> EngineConfig:
    pages = -(-(PROMPT + 8 * STEPS * (drafts + 1) + 64) // PAGE_SIZE)
    return EngineConfig(
        str(checkpoint),
        device="cuda",
        collectives="nccl",
        dtype="bf16",
        num_pages=rows * pages + 1,
        max_model_len=(pages - 1) * PAGE_SIZE,
        max_rows=rows,
        drafts=drafts,
        chunk=max(256, PROMPT),
    )


def fill(runner: StepRunner, rows: int) -> None:
    """Puts a prompt into each of the rows."""
    pages = runner.config.pages_per_row
    generator = np.random.default_rng(1)
    for row in range(rows):
        prompt = generator.integers(0, 1000, PROMPT).astype(np.int32)
        init = RowInit(row, row + 1, 0.8, 1.0, 0, 1 << 30, ())
        grant = PageGrant(row, 0, np.arange(row * pages, (row + 1) * pages, dtype=np.int32))
        chunk = PrefillChunk(row, 0, PROMPT, prompt)
        runner.run(StepPlan(0, (init,), (grant,), (chunk,))).wait()


def timed(runner: StepRunner, rows: int, steps: int) -> float:
    """Median milliseconds of a step as the rank runs it, two in flight, without an engine."""
    plan = StepPlan(0, decode=tuple(range(rows)))
    pending = [runner.run(plan), runner.run(plan)]
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        pending.append(runner.run(plan))
        pending.pop(0).wait()
        times.append(time.perf_counter() - started)
    for step in pending:
        step.wait()
    return 1000 * statistics.median(times)


def replayed(runner: StepRunner, bucket: int, steps: int) -> float:
    """Mean milliseconds of a bare replay: no host work between the steps."""
    shape = runner.graphs.decode_shape(bucket)
    assert shape is not None
    graph = next(iter(runner.graphs.shapes[shape].whole.values())).graph
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    first.record()
    for _ in range(steps):
        graph.replay()
    last.record()
    last.synchronize()
    runner.slots.restart()  # the device counted results that nobody asked for
    return float(first.elapsed_time(last)) / steps


@dataclass(frozen=True)
class Event:
    """Something that the device ran. What one replay runs has one launch number."""

    name: str
    start: int  # ns
    end: int
    launch: int


def events_of(runner: StepRunner, rows: int) -> list[Event]:
    """Everything that the device runs in `PROFILED` steps behind one another, in order."""
    plan = StepPlan(0, decode=tuple(range(rows)))
    runner.run(plan).wait()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        pending = [runner.run(plan) for _ in range(AHEAD + PROFILED)]
        for step in pending:
            step.wait()
        torch.cuda.synchronize()
    found = [
        Event(e.name(), e.start_ns(), e.start_ns() + e.duration_ns(), e.correlation_id())
        for e in profiler.profiler.kineto_results.events()
        if e.device_type().name == "CUDA"
    ]
    ordered = sorted((e for e in found if "Synchronize" not in e.name), key=lambda e: e.start)
    replays = [a.launch for a, b in pairwise(ordered) if a.launch == b.launch]
    first = list(dict.fromkeys(replays))[AHEAD]
    return ordered[next(i for i, event in enumerate(ordered) if event.launch == first) :]


def foreign(names: Counter[str], ours: dict[str, str]) -> dict[str, int]:
    """What ran that is neither ours nor a copy nor NCCL's: by name, how often."""
    allowed = ("Memcpy", "Memset", "nccl")
    return {
        name: count
        for name, count in names.items()
        if name not in ours and not name.startswith(allowed)
    }


def layers_by_kind(names: list[str], ours: dict[str, str]) -> dict[str, Any]:
    """The kernels from one layer's mark to the next layer's, by what the layer is made of: how
    many layers of the kind, how many kernels one has, and which (those of the most usual form).

    A window holds a layer's attention and feed-forward, and what the next one does before its mark.
    """
    rooms = [ours.get(name, "") for name in names]
    marks = [i for i, name in enumerate(names) if name == LAYER_MARK]
    found: dict[str, Counter[tuple[str, ...]]] = {}
    for a, b in pairwise(marks):
        inside = set(rooms[a:b])
        if "sampling" in inside or "vocabulary" in inside:
            continue  # the pass ends in it
        routed = "MoE" if "experts" in inside else "dense"
        kind = f"{routed}, {'own' if 'topk_select' in inside else 'shared'} index"
        found.setdefault(kind, Counter())[tuple(names[a:b])] += 1
    table = {}
    for kind, forms in sorted(found.items()):
        usual, _ = forms.most_common(1)[0]
        table[kind] = {
            "layers": forms.total() // PROFILED,
            "kernels": len(usual),
            "names": list(usual),
            "other_counts": sorted({len(form) for form in forms} - {len(usual)}),
        }
    return table


def largest(gaps: list[float]) -> dict[str, Any]:
    """Gaps in us."""
    ordered = sorted((round(gap, 1) for gap in gaps), reverse=True)
    return {"over_3_us": sum(gap > 3 for gap in gaps), "largest_us": ordered[:6]}


def describe(events: list[Event]) -> dict[str, Any]:
    """Gaps inside a replay are the graph's own; between replays the host launches something."""
    ours, names = operators(), Counter(event.name for event in events)
    pairs = [((b.start - a.end) / 1000, a, b) for a, b in pairwise(events)]
    spans: dict[int, list[Event]] = {}
    for event in events:
        spans.setdefault(event.launch, []).append(event)
    replays = [span for span in spans.values() if len(span) > 1]
    return {
        "kernels_a_step": round(len(events) / PROFILED, 1),
        "busy_us_a_step": round(sum(e.end - e.start for e in events) / 1000 / PROFILED, 1),
        "replay_us": [round((span[-1].end - span[0].start) / 1000, 1) for span in replays],
        "launches_a_step": round(len(spans) / PROFILED, 1),
        "gaps_inside_a_replay": largest([g for g, a, b in pairs if a.launch == b.launch]),
        "gaps_between_launches": [
            (f"{a.name} -> {b.name}", round(gap, 1)) for gap, a, b in pairs if a.launch != b.launch
        ],
        "layers": layers_by_kind([event.name for event in events], ours),
        "foreign": foreign(names, ours),
        "names": dict(names.most_common()),
    }


def shortest(measure: Callable[[], float]) -> float:
    """Milliseconds: what others do on the machine only adds to them."""
    return round(min(measure() for _ in range(RUNS)), 4)


def rank_rows(checkpoint: Path, rows: int, drafts: int, buckets: list[int]) -> list[dict[str, Any]]:
    config, _ = resolve(settings(checkpoint, rows, drafts))
    ring = BroadcastRing.create(1, 1 << 16, "plans")
    started = time.perf_counter()
    runner, _ = build(config, SingleGroup(), ring, None)
    loaded = time.perf_counter() - started
    fill(runner, rows)
    table = []
    for bucket in buckets:
        row: dict[str, Any] = {"drafts": drafts, "rows": bucket}
        row["replay_ms"] = shortest(partial(replayed, runner, bucket, STEPS))
        row["captured_ms"] = shortest(partial(timed, runner, bucket, STEPS))
        row |= describe(events_of(runner, bucket))
        kept, runner.graphs.shapes = runner.graphs.shapes, {}
        row["eager_ms"] = round(timed(runner, bucket, 10), 4)
        runner.graphs.shapes = kept
        row["graph_mib"] = round(runner.graphs.bytes / 2**20)
        row["load_and_capture_s"] = round(loaded, 1)
        table.append(row)
        print({k: v for k, v in row.items() if k != "names"}, flush=True)
    del runner
    torch.cuda.empty_cache()
    return table


def engine_row(client: EngineClient, rows: int) -> float:
    """Milliseconds of a step while the engine plans: from the chunks' arrival (one a step and
    stream), once `rows` streams run and the loop has found how many steps to keep in flight."""
    tokens = 6 * STEPS
    generator = np.random.default_rng(1)
    for row in range(rows):
        prompt = generator.integers(0, 1000, PROMPT).astype(np.int32)
        sampling = SamplingParams(max_tokens=tokens, temperature=0.8, seed=row, ignore_eos=True)
        client.submit(Request(f"{rows}-{row}", prompt, sampling))
    arrived: dict[str, list[float]] = {}
    open_streams = rows
    while open_streams:
        for chunk in client.receive(60.0):
            arrived.setdefault(chunk.uid, []).append(time.perf_counter())
            open_streams -= chunk.finish_reason is not None
    # All streams run from the last one's first chunk to the first one's last; of that the half.
    start = max(times[0] for times in arrived.values())
    end = min(times[-1] for times in arrived.values())
    start = (start + end) / 2
    stream = next(iter(arrived.values()))
    inside = [at for at in stream if start <= at <= end]
    assert len(inside) > 10, (rows, len(inside))
    return 1000 * (inside[-1] - inside[0]) / (len(inside) - 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--format", choices=sorted(FORMATS), default="fp8", help="of the preset")
    parser.add_argument("--drafts", type=int, nargs="*", default=[0, 5])
    parser.add_argument("--buckets", type=int, nargs="*", default=[1, 8, 32, 64])
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    table = []
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = arguments.checkpoint or Path(directory)
        if not arguments.checkpoint:
            make_checkpoint(checkpoint, "block", 1, arguments.format)
        most = max(arguments.buckets)
        for drafts in arguments.drafts:
            part = rank_rows(checkpoint, most, drafts, arguments.buckets)
            client = EngineClient.start(settings(checkpoint, most, drafts), print)
            try:
                for row in part:
                    row["engine_ms"] = shortest(partial(engine_row, client, row["rows"]))
                    planned = row["engine_ms"] / row["captured_ms"] - 1
                    print(drafts, row["rows"], "planned", row["engine_ms"], f"{planned:+.1%}")
            finally:
                client.close()
            table += part
    name = arguments.checkpoint.name if arguments.checkpoint else f"block, {arguments.format}"
    written = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "checkpoint": name,
        "rows": table,
    }
    arguments.output.write_text(json.dumps(written, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
