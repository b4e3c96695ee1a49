# SPDX-License-Identifier: Apache-2.0
"""`glmserve bench-rank` on a small model and the CPU: the whole path, and what its record says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from glmserve.checkpoint.declared import open_source
from glmserve.checkpoint.ledger import MEMORY_RATE, ledger
from glmserve.checkpoint.synthetic import PRESETS, make_checkpoint
from glmserve.cli import main
from glmserve.runtime.rank_bench import Case, cases

RANKS, CONTEXT = 4, 128


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("bench")
    make_checkpoint(folder, "tiny", 0)
    out = folder / "rank.json"
    arguments = [
        "bench-rank", "--config", str(folder), "--ranks", str(RANKS), "--rank", "1", "--synthetic",
        "--device", "cpu", "--rows", "1,8", "--context", str(CONTEXT), "--drafts", "0,3",
        "--prefill", "100", "--chunk", "64", "--json", str(out),
    ]  # fmt: skip
    assert main(arguments) == 0
    return folder, json.loads(out.read_text(encoding="utf-8"))


def row(record: dict[str, Any], part: str, rows: int) -> dict[str, Any]:
    return next(r for r in record["rows"] if (r["part"], r["rows"]) == (part, rows))


def test_rows_take_the_most_drafts_that_make_whole_requests() -> None:
    made = cases([1, 6, 32, 192], [8192], [0, 5])
    assert [(case.rows, case.drafts, case.requests) for case in made] == [
        (1, 0, 1), (6, 5, 1), (32, 0, 32), (192, 5, 32),
    ]  # fmt: skip
    assert cases([4], [1, 2], [1]) == [Case(4, 1, 1), Case(4, 2, 1)]


def test_the_record_says_what_was_measured(recorded: tuple[Path, dict[str, Any]]) -> None:
    record = recorded[1]
    assert {"card", "versions", "date", "rows", "memory", "cache_pages"} <= set(record)
    parts = [(r["part"], r["rows"], r["drafts"]) for r in record["rows"]]
    assert parts == [("step", 1, 0), ("step", 8, 3), ("target", 8, 3), ("prefill", 100, 3)]
    assert all(r["ms"] > 0 for r in record["rows"])
    assert all(r["logits_finite"] for r in record["rows"] if r["part"] != "prefill")


def test_floors_are_the_ledgers(recorded: tuple[Path, dict[str, Any]]) -> None:
    folder, record = recorded
    made = ledger(open_source(str(folder)), RANKS, 8, CONTEXT, 3)
    whole, target = row(record, "step", 8), row(record, "target", 8)
    assert whole["bytes"] == round(made.bytes)
    assert target["bytes"] == round(sum(o.bytes for o in made.operators))
    assert whole["floor_ms"] == round(made.bytes / MEMORY_RATE * 1e3, 3)
    assert whole["links_ms"] >= target["links_ms"]


def test_stand_ins_move_the_collectives_bytes(recorded: tuple[Path, dict[str, Any]]) -> None:
    """Sums as the ledger counts them, in fp32 on the CPU instead of bf16."""
    folder, record = recorded
    made = {c.name: c for c in ledger(open_source(str(folder)), RANKS, 8, CONTEXT, 3).collectives}
    target = row(record, "target", 8)["link_bytes"]["all_reduce"]
    assert target == 2 * made["target boundaries"].one_shot
    drafts = row(record, "step", 8)["link_bytes"]["all_reduce"] - target
    passes = ("first draft pass", "later draft passes")
    assert drafts == 2 * sum(made[name].one_shot for name in passes)


def test_rows_hit_different_experts(recorded: tuple[Path, dict[str, Any]]) -> None:
    record = recorded[1]
    local = PRESETS["tiny"]["n_routed_experts"] // RANKS
    for found in record["rows"][:3]:
        hit, expected = found["experts_hit_per_layer"], found["experts_hit_expected"]
        assert 0 < hit <= local
        assert abs(hit - expected) <= 0.5 * expected


def test_a_rank_that_is_not_there_is_refused(
    recorded: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--config", str(recorded[0]), "--ranks", "2", "--rank", "2", "--device", "cpu"]
    assert main(["bench-rank", *arguments]) == 1
    assert "rank" in capsys.readouterr().err
