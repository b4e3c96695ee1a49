# SPDX-License-Identifier: Apache-2.0
"""The memory plan: exact where it says so, consistent with itself, and a refusal with numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from glmserve.checkpoint.declared import Source, open_source
from glmserve.checkpoint.memory_plan import H200_GB, MemoryPlan, memory_plan, with_planned_pages
from glmserve.checkpoint.placement import held_weights
from glmserve.checkpoint.weights import allocate
from glmserve.config import PAGE_SIZE, EngineConfig
from glmserve.errors import ConfigError
from glmserve.model import indexer
from glmserve.model.caches import Caches


@pytest.fixture(scope="module")
def glm() -> Source:
    return open_source("glm-5.2-fp8")


def settings(**changes: Any) -> EngineConfig:
    values: dict[str, Any] = {
        "ranks": 8, "device": "cuda", "dtype": "bf16", "collectives": "nccl", "num_pages": 0,
    }  # fmt: skip
    return EngineConfig("glm-5.2-fp8", **values | changes)


def plan(source: Source, gb: float = H200_GB, **changes: Any) -> MemoryPlan:
    return memory_plan(source, settings(**changes), gb * 1e9)


def weights_gb(of: MemoryPlan) -> float:
    return sum(item.bytes for item in of.items if item.name.startswith("weights: ")) / 1e9


@pytest.mark.parametrize("drafts", [0, 5])
def test_weights_are_those_that_a_rank_allocates(glm: Source, drafts: int) -> None:
    held = held_weights(glm.config, glm.weights, 0, 8, "ep", keep=True, mtp=drafts > 0)
    weights, _ = allocate(glm.config, held, torch.bfloat16, "meta")
    assert weights_gb(plan(glm, drafts=drafts)) * 1e9 == weights.parameter_bytes


@pytest.mark.parametrize(("kv", "a_token"), [("fp8", 53_940 + 788), ("model", 92_628 - 2_772)])
def test_a_page_costs_what_the_caches_allocate(glm: Source, kv: Any, a_token: int) -> None:
    made = plan(glm, kv_dtype=kv)
    caches = Caches.allocate(glm.config, 10, PAGE_SIZE, torch.bfloat16, "meta", made.kv)
    tensors = [t for c in (*caches.layers, caches.mtp) if c for t in (c.latent, c.index_k)]
    size = sum(t.numel() * t.element_size() for t in tensors if t is not None)
    assert size == 10 * made.page_bytes
    if kv == "fp8":
        assert made.token_bytes == a_token


def test_everything_adds_up_to_the_memory(glm: Source) -> None:
    made = plan(glm, drafts=5)
    rest = made.memory - made.used - made.pages * made.page_bytes
    assert 0 <= rest < 3 * made.page_bytes
    # An H200 has about 45 GB left; a million tokens (56.6 GB) do not fit without sharding them.
    assert 30e9 < made.pages * made.page_bytes < 50e9
    assert made.at_once(1 << 20) == 0
    assert made.at_once(8192) == (made.pages - 1) // 129  # 128 pages and the drafts' lookahead
    assert 1 <= made.at_once(made.max_model_len) < 2


def test_a_shorter_limit_leaves_more_pages(glm: Source) -> None:
    free, short = plan(glm), plan(glm, max_model_len=8192)
    assert short.pages > free.pages
    assert short.max_model_len == 8192


def test_settings_get_all_pages_that_fit(glm: Source) -> None:
    config = with_planned_pages(settings(), glm, H200_GB * 1e9)
    assert config.num_pages == plan(glm).pages
    asked = with_planned_pages(settings(num_pages=100), glm, H200_GB * 1e9)
    assert asked.num_pages == 100
    limited = config.with_limits(glm.config.max_position_embeddings)
    assert limited.max_model_len == plan(glm).max_model_len


@pytest.mark.parametrize(
    ("gb", "changes", "words"),
    [
        (80.0, {}, r"memory = '80\.00 GB': is too little: .*routed experts 90\.6"),
        (149.0, {"num_pages": 50_000}, r"num_pages = 50000: need 17\d\.\d\d GB a rank, 1\d{4} fit"),
        (149.0, {"max_model_len": 1_048_576}, r"max_model_len = 1048576: needs more than the \d+"),
    ],
)
def test_what_does_not_fit_is_refused_with_numbers(
    glm: Source, gb: float, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        with_planned_pages(settings(**changes), glm, gb * 1e9)


def test_index_scores_are_bounded_as_the_indexer_bounds_them(glm: Source) -> None:
    (scores,) = (i.bytes for i in plan(glm, chunk=8192).items if i.name == "index scores")
    assert scores == 4 * indexer.MOST_SCORES


def test_less_memory_never_gives_more(glm: Source) -> None:
    pages = [plan(glm, gb).pages for gb in (105, 110, 120, 140, 180)]
    assert pages == sorted(pages)
    assert pages[0] < pages[-1]
