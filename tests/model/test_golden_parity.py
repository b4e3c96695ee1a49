# SPDX-License-Identifier: Apache-2.0
"""The model against transformers in fp32: logits, every selection and routing, tokens, drafts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from glmserve.model_config import ExpertLayout
from glmserve.parallel.group import Group
from tests.golden.store import golden
from tests.model.ranks import Run, greedy, load, mask_of, on_ranks
from tests.tolerances import assert_close

MIN_INDEX_MARGIN = 2e-5  # fp32 rounding reaches a few 1e-6: closer candidates may change places

Golden = dict[str, np.ndarray[Any, Any]]


def run_golden(
    preset: str, seed: int, ranks: int = 1, layout: ExpertLayout = "ep", copy: str = ""
) -> tuple[Golden, list[Run]]:
    directory = golden(preset, seed, copy)
    with np.load(directory / (f"golden_{copy}.npz" if copy else "golden.npz")) as file:
        g = dict(file)
    assert g["topk_margin_min"].min() >= MIN_INDEX_MARGIN
    assert g["mtp_topk_margin_min"] >= MIN_INDEX_MARGIN
    page_table = torch.tensor([[5, 2, 6, 1, 0]], dtype=torch.int32)

    def work(group: Group) -> Run:
        model = load(directory, torch.float32, group, layout)
        prompt = torch.from_numpy(g["prompt"])
        return greedy(model, prompt, len(g["greedy_tokens"]), page_table)

    return g, on_ranks(ranks, work)


def check(g: Golden, run: Run) -> None:
    taps, length = run.taps[0].tensors(), len(g["prompt"])
    for layer, positions in enumerate(taps["selected"]):
        got = mask_of(positions, length).numpy()
        assert (got == g["topk_mask"][layer]).all(), f"selection of layer {layer}"
    assert taps["moe_layers"].tolist() == g["moe_layers"].tolist()
    assert (taps["router_experts"].numpy() == g["router_experts"]).all()
    assert_close(
        "router weights", g["router_weights"], taps["router_weights"], "golden_router_weights_fp32"
    )
    assert_close("hidden", g["hidden_layers"], taps["hidden_layers"], "golden_hidden_fp32")
    assert_close("logits", g["logits_prefill"], run.prompt_logits, "golden_logits_fp32")
    assert run.tokens == g["greedy_tokens"].tolist()
    assert_close("final hidden", g["final_hidden"], run.hidden, "golden_hidden_fp32")
    # The entry of position i lies at cache coordinate i + 1.
    steps = len(g["final_hidden"])
    mtp_mask = mask_of(run.mtp_selected, steps + 1).numpy()
    assert not mtp_mask[:, 0].any()
    assert (mtp_mask[:, 1:] == g["mtp_topk_mask"]).all()
    assert_close("mtp hidden", g["mtp_hidden_zero0"], run.mtp_hidden, "golden_hidden_fp32")
    assert run.drafts[False] == g["mtp_draft_tokens_share0"].tolist()
    assert run.drafts[True] == g["mtp_draft_tokens_share1"].tolist()


@pytest.mark.parametrize(
    ("preset", "seed"), [("tiny", 21), ("tiny", 22), ("odd", 21), ("odd", 22), ("block", 21)]
)
def test_one_rank_equals_transformers(preset: str, seed: int) -> None:
    g, (run,) = run_golden(preset, seed)
    check(g, run)


@pytest.mark.processes  # eight busy threads: not beside another such test
@pytest.mark.parametrize(
    ("preset", "ranks", "layout"),
    [
        ("tiny", 8, "ep"),
        ("tiny", 8, "sliced"),
        ("odd", 2, "ep"),
        ("odd", 2, "sliced"),
        ("block", 8, "ep"),
        ("block", 8, "sliced"),
    ],
)
def test_many_ranks_equal_transformers(preset: str, ranks: int, layout: ExpertLayout) -> None:
    g, runs = run_golden(preset, 21, ranks, layout)
    check(g, runs[-1])


@pytest.mark.parametrize(
    ("preset", "seed", "copy"),
    [
        ("tiny", 21, "fp8"),
        ("odd", 21, "fp8"),
        ("tiny", 22, "int4"),
        ("tiny", 23, "awq"),
        ("block", 25, "int4-g128"),
    ],
)
def test_quantised_weights_equal_the_dequantised_golden(preset: str, seed: int, copy: str) -> None:
    g, (run,) = run_golden(preset, seed, copy=copy)
    check(g, run)


@pytest.mark.processes
@pytest.mark.parametrize(("preset", "seed", "copy"), [("block", 21, "fp8"), ("tiny", 22, "int4")])
def test_cuts_of_quantised_weights_equal_the_dequantised_golden(
    preset: str, seed: int, copy: str
) -> None:
    """Eight ranks: 32 columns of a block of 128, 8 of a group of 32."""
    g, runs = run_golden(preset, seed, 8, "sliced", copy)
    check(g, runs[-1])


def test_selection_matters_for_the_golden() -> None:
    """Without it a wrong indexer would pass: the dense logits must fail the comparison."""
    with np.load(golden("tiny", 21) / "golden.npz") as g, pytest.raises(AssertionError):
        assert_close("dense", g["logits_prefill"], g["logits_prefill_dense"], "golden_logits_fp32")
