# SPDX-License-Identifier: Apache-2.0
"""The small checkpoint's training: which loss moves what, that it learns, that it goes on."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from glmserve import env
from glmserve.model_config import ModelConfig
from tools.tiny import export, sizes
from tools.tiny.objective import Batch, Pass, Runner, ahead, weighted_loss
from tools.tiny.optimiser import Optimiser, orthogonal, rate_factor
from tools.tiny.twin import Twin

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ModelConfig.from_dict(sizes.raw_config("trial", [1], 1))


def _batch(rows: int = 2, width: int = 64) -> Batch:
    """Each row repeats a pattern of its own, as two conversations."""
    generator = torch.Generator().manual_seed(1)
    pattern = torch.randint(0, 50, (rows, 5), generator=generator)
    ids = pattern.repeat(1, width // 5 + 1)[:, :width]
    documents = (torch.arange(width) >= width - 20).long().repeat(rows, 1)
    positions = torch.arange(width).repeat(rows, 1)
    positions[:, width - 20 :] -= width - 20
    return Batch(ids, positions, documents, torch.ones(rows, width))


def _losses(twin: Twin, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, Pass]:
    rows = len(batch.ids)
    out = Runner(twin, torch.float32).forward(batch, 1, slice(0, 2), rows)
    parts = [out.hidden, *out.drafts]
    losses = [
        weighted_loss(twin.lm_head, hidden, *ahead(batch, k, rows))[0]
        for k, hidden in enumerate(parts, 1)
    ]
    return torch.stack(losses).sum(), torch.stack(out.divergence).sum(), out


def test_the_indexers_learn_from_their_own_loss_only() -> None:
    for own in (False, True):
        twin = Twin(CONFIG)
        loss = _losses(twin, _batch())[own]
        loss.backward()  # type: ignore[no-untyped-call]
        for name, parameter in twin.named_parameters():
            moved = parameter.grad is not None and bool((parameter.grad != 0).any())
            assert moved == (("indexer" in name) == own), name


def test_losses_fall_and_the_first_token_of_a_conversation_is_nobodys_target() -> None:
    twin, batch = Twin(CONFIG), _batch()
    for steps in (1, 2, 3):
        _, weights = ahead(batch, steps, 2)
        assert (weights[:, 64 - 20 - steps : 64 - 20] == 0).all()
        assert (weights[:, 64 - steps :] == 0).all()
    optimiser, seen = Optimiser(twin, 0.02, 0.003), []
    for step in range(5):
        loss, divergence, _ = _losses(twin, batch)
        (loss + divergence).backward()
        optimiser.step(rate_factor(0.0, step, warm=2))
        seen.append((float(loss.detach()), float(divergence.detach())))
    assert seen[-1][0] < 0.9 * seen[0][0], seen


def test_orthogonal_levels_singular_values() -> None:
    x = torch.randn(3, 40, 24, generator=torch.Generator().manual_seed(2))
    values = torch.linalg.svdvals(orthogonal(x))
    assert values.min() > 0.4
    assert values.max() < 1.4


def test_rate_rises_holds_and_falls() -> None:
    rates = [rate_factor(step / 1000, step, warm=100, hold=0.5) for step in range(1000)]
    assert all(a <= b for a, b in itertools.pairwise(rates[:100]))
    assert set(rates[100:500]) == {1.0}
    assert all(a >= b for a, b in itertools.pairwise(rates[500:]))
    assert rates[-1] < 0.03


@pytest.mark.slow
def test_training_saves_and_goes_on_from_what_it_saved(tmp_path: Path) -> None:
    def train(name: str, *more: str) -> Path:
        out = tmp_path / name
        command = [sys.executable, str(ROOT / "tools" / "train_tiny.py"), "--out", str(out)]
        command += ["--sizes", "trial", "--rows", "2", "--width", "160", "--longest", "100"]
        command += ["--workers", "1", "--evaluate", "0", "--steps", "2", *more]
        subprocess.run(command, check=True, timeout=250, env=env.child_environment({}))
        return out

    first = train("first")
    second = train("second", "--resume", str(first))
    twins = [Twin(CONFIG), Twin(CONFIG)]
    for twin, directory in zip(twins, (first, second), strict=True):
        export.load_weights(twin, directory)
    gap = max(
        float((a - b).detach().abs().max())
        for a, b in zip(twins[0].parameters(), twins[1].parameters(), strict=True)
    )
    assert 0 < gap < 0.1  # moved on, and from there
    log = [json.loads(line) for line in (second / "log.jsonl").read_text().splitlines()]
    assert {"prepared_s", "accepted_length"} <= {key for line in log for key in line}
