# SPDX-License-Identifier: Apache-2.0
"""Times one rank's steps: decode steps as graph replays, prefill as it is run, with their floors.

The code is the server's: the step runner, its row state, sampler, verification and drafts. On CPU
(tests) steps are called instead of replayed and have no split.
"""

from __future__ import annotations

import importlib.metadata
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glmserve.checkpoint.ledger import MEMORY_RATE, Ledger, ledger, prefill_floor
from glmserve.messages import PageGrant, PrefillChunk, RowInit, StepPlan
from glmserve.parallel.stand_in import StandInGroup
from glmserve.runtime.kernel_split import Section, profiled, sections, split
from glmserve.runtime.lone_rank import LoneRank, Requests
from glmserve.runtime.step import StepRunner
from glmserve.runtime.variants import Variant

REPEATS = 20
PLAIN = Variant(shaped=False, limited=False)
Step = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """A decode step: `rows` rows of rows / (drafts + 1) requests with `context` tokens each."""

    rows: int
    context: int
    drafts: int

    @property
    def requests(self) -> int:
        return self.rows // (self.drafts + 1)


def cases(rows: list[int], contexts: list[int], drafts: list[int]) -> list[Case]:
    """Each number of rows takes the most drafts that make whole requests of it."""
    return [
        Case(count, context, max(k for k in [0, *drafts] if count % (k + 1) == 0))
        for context in contexts
        for count in rows
    ]


def timed(
    step: Step,
    device: torch.device,
    repeats: int = REPEATS,
    before: Callable[[], object] = lambda: None,
) -> float:
    """Median milliseconds; `before` runs ahead of each step and is not counted. On a GPU steps are
    enqueued one behind the other, as a server does, so that a graph's launch is not waited for."""
    if device.type != "cuda":
        return statistics.median(_called(step, before) for _ in range(repeats))
    marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    for _ in range(2 + repeats):
        before()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        step()
        last.record()
        marks.append((first, last))
    torch.cuda.synchronize()
    return statistics.median(float(first.elapsed_time(last)) for first, last in marks[2:])


def _called(step: Step, before: Callable[[], object]) -> float:
    before()
    started = time.perf_counter()
    step()
    return 1000 * (time.perf_counter() - started)


class Decode:
    """One case, ready to be timed."""

    def __init__(self, rank: LoneRank, case: Case, chunk: int = 256) -> None:
        self.rank, self.case = rank, case
        self.runner = rank.runner(case.requests, case.context, case.drafts, chunk)
        self.requests = Requests(rank, self.runner, case.requests, case.context)
        self.device = self.runner.device
        self.received: dict[str, dict[str, int]] = {}
        self.finite = False

    @torch.inference_mode()
    def prepare(self) -> dict[str, Step]:
        """Runs the step once, which compiles it, and captures it: the whole one, and with drafts
        the target's part alone."""
        runner, layout = self.runner, self.requests.layout
        hidden, logits = runner.forward(layout)
        self.finite = bool(torch.isfinite(logits).all()) and bool(torch.isfinite(hidden).all())
        runs: dict[str, Callable[[], None]] = {"step": self._whole}
        if self.case.drafts:
            runs["target"] = self._target
        group = self.rank.group
        for name, run in runs.items():
            if isinstance(group, StandInGroup):
                group.received.clear()
            run()
            self.received[name] = dict(group.received) if isinstance(group, StandInGroup) else {}
        parts: dict[str, Step] = {**runs}
        if self.device.type == "cuda":
            parts = {name: captured(run) for name, run in runs.items()}
        self.requests.place()
        return parts

    @torch.inference_mode()
    def _whole(self) -> None:
        layout = self.requests.layout
        self.runner.finish(layout, *self.runner.forward(layout), PLAIN)

    @torch.inference_mode()
    def _target(self) -> None:
        layout, drawer = self.requests.layout, self.runner.drawer
        logits = self.runner.forward(layout)[1]
        drawer.verify(layout, drawer.draw(layout, logits, PLAIN), PLAIN)

    def measure(self, parts: dict[str, Step], with_split: bool) -> list[dict[str, Any]]:
        """A record for each part. Every step starts from the same place: what it drafted is random
        weights' draft, and rows of one token choose the same experts. Timings come first, so that
        nothing else runs between them."""
        place = self.requests.place
        ms = {name: timed(part, self.device, before=place) for name, part in parts.items()}
        place()
        hit = experts_hit(self.rank, self.runner, parts["step"])
        records = []
        for name, part in parts.items():
            self.requests.place()
            kernels = profiled(part) if with_split and self.device.type == "cuda" else []
            records.append(self._record(name, ms[name], hit, split(kernels), sections(kernels)))
        return records

    def _record(
        self, part: str, ms: float, hit: Tensor, parts: dict[str, float], of: list[Section]
    ) -> dict[str, Any]:
        case, config = self.case, self.runner.config
        floors = ledger(
            self.rank.source,
            config.ranks,
            case.rows,
            case.context,
            case.drafts,
            config.expert_layout,
        )
        read = floors.bytes if part == "step" else sum(o.bytes for o in floors.operators)
        links = floors.collectives if part == "step" else _target_links(floors)
        return {
            "part": part,
            "rows": case.rows,
            "context": case.context,
            "drafts": case.drafts,
            "ms": round(ms, 3),
            "floor_ms": round(read / MEMORY_RATE * 1e3, 3),
            "bytes": round(read),
            "links_ms": round(sum(c.floor for c in links) * 1e3, 3),
            "split": parts,
            "experts_hit_per_layer": round(float(hit.float().mean()), 2),
            "experts_hit_expected": round(floors.experts_hit, 2),
            "logits_finite": self.finite,
            "link_bytes": self.received[part],
            "max_model_len": config.max_model_len,
            "pages_shared": not self.rank.fits(case.requests, case.context, case.drafts),
            "sections": of,
        }


def _target_links(floors: Ledger) -> list[Any]:
    return [c for c in floors.collectives if "draft" not in c.name]


def captured(step: Callable[[], None]) -> Step:
    """The step as a graph; it must have run before."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def experts_hit(rank: LoneRank, runner: StepRunner, step: Step) -> Tensor:
    """[routed layers of the target] this rank's experts that one step's rows chose."""
    model, config = rank.source.config, rank.config
    before = runner.load.totals.clone()
    step()
    chosen = (runner.load.totals - before)[: sum(layer.routed for layer in rank.decoder.layers)]
    if config.expert_layout == "ep":
        local = model.n_routed_experts // config.ranks
        chosen = chosen[:, rank.group.rank * local : (rank.group.rank + 1) * local]
    return (chosen > 0).sum(dim=1)


class Prefill:
    """A prompt of `tokens` tokens in chunks of `chunk`, from an empty row to its first token."""

    def __init__(self, rank: LoneRank, tokens: int, chunk: int, drafts: int) -> None:
        self.rank, self.tokens, self.chunk, self.drafts = rank, tokens, chunk, drafts
        self.runner = rank.runner(1, tokens, drafts, chunk)
        pages = np.arange(self.runner.config.pages_per_row, dtype=np.int32)
        init = RowInit(0, 1, 1.0, 1.0, 0, 1 << 30, ())
        prompt = np.random.default_rng(4).integers(*rank.tokens, tokens).astype(np.int32)
        self._plans = [
            StepPlan(
                0,
                (init,) if start == 0 else (),
                (PageGrant(0, 0, pages),) if start == 0 else (),
                (PrefillChunk(0, start, length, prompt[start : start + length + 1]),),
            )
            for start in range(0, tokens, chunk)
            if (length := min(chunk, tokens - start))
        ]

    def run(self) -> None:
        for plan in self._plans:
            pending = self.runner.run(plan)
        pending.wait()

    def _floor(self) -> float:
        config = self.runner.config
        return prefill_floor(self.rank.source, config.ranks, self.tokens, config.expert_layout)

    def measure(self, repeats: int, with_split: bool) -> dict[str, Any]:
        device = self.runner.device
        ms = timed(self.run, device, repeats)
        kernels = profiled(self.run) if with_split and device.type == "cuda" else []
        return {
            "part": "prefill",
            "rows": self.tokens,
            "chunk": self.chunk,
            "context": self.tokens,
            "drafts": self.drafts,
            "ms": round(ms, 3),
            "floor_ms": round(self._floor() * 1e3, 3),
            "split": split(kernels),
            "sections": sections(kernels),
        }


def machine(device: str) -> dict[str, Any]:
    """What was measured on."""
    on_cuda = device == "cuda"
    versions: dict[str, str] = {"torch": str(torch.__version__)}
    if on_cuda:
        versions["triton"] = importlib.metadata.version("triton")
    return {"card": torch.cuda.get_device_name() if on_cuda else "CPU", "versions": versions}


def free_memory(device: str) -> float:
    """Bytes of the GPU that nobody uses; 0 on CPU."""
    return float(torch.cuda.mem_get_info()[0]) if device == "cuda" else 0.0


def memory_record(rank: LoneRank) -> dict[str, int]:
    """Bytes, for a comparison with the memory plan."""
    caches = rank.caches
    layers = [*caches.layers, *([caches.mtp] if caches.mtp else [])]
    held = {
        "weights": rank.weights.parameter_bytes,
        "caches": sum(x.nbytes for c in layers for x in (c.latent, c.index_k) if x is not None),
    }
    if rank.config.device != "cuda":
        return held
    free, total = torch.cuda.mem_get_info()
    return held | {
        "peak_allocated": torch.cuda.max_memory_allocated(),
        "peak_reserved": torch.cuda.max_memory_reserved(),
        "used_on_card": total - free,
    }
