# SPDX-License-Identifier: Apache-2.0
"""`glmserve logits` over real rank processes against the golden: what a reviewer would run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glmserve import cli
from glmserve.errors import InvalidInput
from tests.golden.store import golden
from tests.tolerances import assert_close

SEEDS = {"tiny": 21, "odd": 21, "block": 21}

Arrays = dict[str, np.ndarray[Any, Any]]


def run_logits(directory: Path, out: Path, *options: str) -> Arrays:
    with np.load(directory / "golden.npz") as file:
        ids, new = file["prompt"], len(file["greedy_tokens"])
    np.save(out / "ids.npy", ids)
    command = ["logits", "--checkpoint", str(directory), "--input-ids", str(out / "ids.npy")]
    command += ["--out", str(out / "out.npz"), "--latent-norm-eps", "1e-6", "--new", str(new)]
    assert cli.main([*command, *options]) == 0
    with np.load(out / "out.npz") as file:
        return dict(file)


@pytest.mark.parametrize(
    ("preset", "options"),
    [
        pytest.param("tiny", "--ranks 8", id="tiny-8", marks=pytest.mark.slow),
        pytest.param("tiny", "--ranks 2 --expert-layout sliced --chunk 7", id="tiny-2-sliced"),
        pytest.param("odd", "--ranks 2 --page-seed 1", id="odd-2"),
        pytest.param("block", "--ranks 8 --expert-layout sliced", id="block-8-sliced"),
    ],
)
def test_ranks_reproduce_the_golden(tmp_path: Path, preset: str, options: str) -> None:
    directory = golden(preset, SEEDS[preset])
    out = run_logits(directory, tmp_path, "--dtype", "fp32", "--mtp", "--taps", *options.split())
    with np.load(directory / "golden.npz") as file:
        g = dict(file)
    assert_close("logits", g["logits_prefill"], out["logits"], "golden_logits_fp32")
    assert out["logits"].dtype == np.float32
    assert_close("hidden", g["hidden_layers"], out["hidden_layers"], "golden_hidden_fp32")
    assert_close(
        "weights", g["router_weights"], out["router_weights"], "golden_router_weights_fp32"
    )
    exact = ("topk_mask", "moe_layers", "router_experts", "greedy_tokens")
    for key in (*exact, "mtp_draft_tokens_share0", "mtp_draft_tokens_share1"):
        assert np.array_equal(out[key], g[key]), key


def test_without_mtp_only_logits_and_tokens_are_written(tmp_path: Path) -> None:
    directory = golden("tiny", SEEDS["tiny"])
    out = run_logits(directory, tmp_path, "--dtype", "fp64", "--ranks", "1")
    with np.load(directory / "golden.npz") as file:
        assert np.array_equal(out["greedy_tokens"], file["greedy_tokens"])
    assert set(out) == {"logits", "greedy_tokens"}


def test_ids_that_are_no_integers_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "ids.npy", np.zeros(4))
    command = ["logits", "--checkpoint", "x", "--input-ids", str(tmp_path / "ids.npy")]
    assert cli.main([*command, "--out", str(tmp_path / "o.npz")]) == 1
    assert InvalidInput("--input-ids", "float64", "must hold integers").args[0] in (
        capsys.readouterr().err
    )
