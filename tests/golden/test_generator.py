# SPDX-License-Identifier: Apache-2.0
"""The golden generator: its help, its keys, and margins that mean what they say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np

from glmserve.model_config import ModelConfig
from tests.golden.store import golden

SCRIPT = Path(__file__).with_name("golden.py")


def test_help_names_every_option_and_key() -> None:
    result = subprocess.run(
        [sys.executable, str(SCRIPT), "--help"], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    for option in (
        "--out",
        "--preset",
        "--dtype",
        "--seed",
        "--prompt-len",
        "--new",
        "--fp8",
        "--copy",
    ):
        assert option in result.stdout
    keys = result.stdout.split("KEYS of golden.npz")[1].split("\noptions:")[0]
    with np.load(golden("tiny", 21) / "golden.npz") as g:
        for key in g.files:
            stem = re.sub(r"[01]$", "", key)
            assert stem in keys, f"{key} is not documented"


def test_margins_are_those_of_the_recorded_decisions() -> None:
    directory = golden("tiny", 21)
    config = ModelConfig.from_file(directory / "config.json")
    with np.load(directory / "golden.npz") as g:
        margins = g["topk_margin_min"]
        assert np.isinf(margins[[i for i in range(8) if not config.is_full(i)]]).all()
        assert (margins[list(config.full_layers)] > 0).all()
        assert len(g["router_margin_min"]) == len(g["moe_layers"]) == 5
        assert (g["router_margin_min"] > 0).all()
        assert 0 < g["mtp_topk_margin_min"] < 1
        assert 0 < g["mtp_router_margin_min"] < 1
        for share in (0, 1):
            logits = np.sort(g[f"mtp_draft_logits_share{share}"], axis=1)
            gaps = logits[:, -1] - logits[:, -2]
            assert np.allclose(gaps, g[f"mtp_draft_margin_share{share}"], atol=1e-6)
