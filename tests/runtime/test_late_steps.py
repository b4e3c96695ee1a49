# SPDX-License-Identifier: Apache-2.0
"""A result says whether the device stood idle when its step was launched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from glmserve.checkpoint.synthetic import make_checkpoint
from glmserve.config import EngineConfig
from glmserve.engine.process import resolve
from glmserve.ipc.ring import BroadcastRing
from glmserve.kernels.row_state import columns
from glmserve.messages import PageGrant, PrefillChunk, RowInit, StepPlan
from glmserve.parallel.group import SingleGroup
from glmserve.runtime.graphs import Captured, Head, Step
from glmserve.runtime.packing import Places, Shape, pack
from glmserve.runtime.rank import build
from glmserve.runtime.results import Pending
from glmserve.runtime.step import StepRunner
from glmserve.runtime.variants import ALL_VARIANTS


class Graph:
    """Stands in for a captured step: a replay sends a result without tokens."""

    def __init__(self, runner: StepRunner) -> None:
        self.runner = runner

    def replay(self) -> None:
        self.runner.slots.send(torch.zeros(1, columns.result_width(0), dtype=torch.int32))


class End:
    """Stands in for the event behind a step."""

    reached = False

    def query(self) -> bool:
        return self.reached

    def synchronize(self) -> None:
        self.reached = True


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StepRunner:
    make_checkpoint(tmp_path, "tiny", 3)
    config, _ = resolve(EngineConfig(str(tmp_path), num_pages=4, max_rows=1))
    runner, _ = build(config, SingleGroup(), BroadcastRing.create(1, 64), None)
    shape, nothing, graph = Shape(1, 1, mixed=False), StepPlan(0), Graph(runner)
    layout = pack(nothing, Places.of(nothing, 0, shape), runner.state, None)
    made: Any = Step(graph, runner.state.no_tokens, 1)  # type: ignore[arg-type]
    head = Head(made.graph, torch.empty(0), torch.empty(0))
    runner.graphs.shapes[shape] = Captured(layout, dict.fromkeys(ALL_VARIANTS, made), head, made)
    monkeypatch.setattr(Pending, "mark", lambda pending, _device: vars(pending).update(done=End()))
    return runner


def test_a_step_is_late_when_the_one_before_it_has_ended(runner: StepRunner) -> None:
    first, behind = [runner.run(StepPlan(step, decode=(0,))) for step in range(2)]
    assert not first.wait().late  # nothing was to be waited for
    assert not behind.wait().late
    assert runner.run(StepPlan(2, decode=(0,))).wait().late


def test_behind_an_eager_step_no_step_is_late(runner: StepRunner) -> None:
    runner.run(StepPlan(0, decode=(0,))).wait()
    prompt = StepPlan(
        1,
        (RowInit(0, 1, 0.0, 1.0, 0, 9, ()),),
        (PageGrant(0, 0, np.array([1], dtype=np.int32)),),
        (PrefillChunk(0, 0, 5, np.arange(5, dtype=np.int32)),),
    )
    assert runner.run(prompt).wait().tokens.size == 1
    assert not runner.run(StepPlan(2, decode=(0,))).wait().late
    assert runner.run(StepPlan(3, decode=(0,))).wait().late
