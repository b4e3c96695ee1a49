# SPDX-License-Identifier: Apache-2.0
"""The golden generator: its help, its keys, and margins that mean what they say."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import numpy as np

from glmserve.model_config import ModelConfig
from tests.golden.store import golden

SCRIPT = Path(__file__).with_name("golden.py")


def test_the_docstring_which_is_the_help_names_every_option_and_key() -> None:
    code = SCRIPT.read_text()  # read, not run: importing transformers takes longer than the rest
    text = ast.get_docstring(ast.parse(code))
    assert text is not None
    usage, keys = text.split("KEYS of golden.npz")
    options = re.findall(r'add_argument\("(--[a-z0-9-]+)"', code)
    assert len(options) == 10
    for option in options:
        assert option in usage, f"{option} is not documented"
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
