# SPDX-License-Identifier: Apache-2.0
"""The committed small checkpoint: its files, a few held-out answers of each task, its drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from glmserve.checkpoint.layout import checkpoint_tensors
from glmserve.config import engine_config_from_env
from glmserve.engine.bench import PROMPTS, Run, answer_all, prompts_of, read_requests
from glmserve.engine.client import EngineClient
from glmserve.model_config import ModelConfig
from glmserve.text.chat_request import ChatRequest
from glmserve.text.output import OutputProcessor
from glmserve.text.prompt import PromptBuilder
from tools import evaluate
from tools.tiny import export
from tools.tiny.objective import Batch, Runner
from tools.tiny.twin import Twin

DIRECTORY = Path(__file__).resolve().parents[2] / "checkpoints" / "tiny"
EACH = 1  # prompts of a task
DRAFTS = 3


@pytest.fixture(scope="module")
def requests() -> list[dict[str, Any]]:
    """The first of each task."""
    taken: dict[str, list[dict[str, Any]]] = {}
    for request in read_requests(DIRECTORY / PROMPTS):
        taken.setdefault(request["task"], []).append(request)
    return [request for same in taken.values() for request in same[:EACH]]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def run(requests: list[dict[str, Any]], request: pytest.FixtureRequest) -> Run:
    """Answers of the reference operators in fp32, of the kernels in bf16."""
    dtype = "fp32" if request.param == "cpu" else "bf16"
    config = engine_config_from_env(
        checkpoint=str(DIRECTORY), device=request.param, ranks=1, dtype=dtype, drafts=DRAFTS,
        num_pages=512,
    )  # fmt: skip
    client = EngineClient.start(config)
    try:
        return answer_all(client, prompts_of(DIRECTORY, requests), 192)
    finally:
        client.close()


def test_files_are_small_and_complete() -> None:
    config = ModelConfig.from_file(DIRECTORY / "config.json")
    files = sorted(DIRECTORY.glob("*.safetensors"))
    assert all(file.stat().st_size < 12_000_000 for file in files)
    assert sum(file.stat().st_size for file in files) <= 24_000_000
    names: set[str] = set()
    for file in files:
        with safe_open(file, "pt") as tensors:
            names |= set(tensors.keys())
    assert names == checkpoint_tensors(config).keys()
    for layout in ("ep", "sliced"):
        config.check_ranks(8, layout)


def test_settings_and_tokenizer_are_what_the_generator_makes(tmp_path: Path) -> None:
    export.new_config(tmp_path, "tiny")
    for name in export.CONFIG_FILES:
        assert (tmp_path / name).read_bytes() == (DIRECTORY / name).read_bytes(), name


@pytest.mark.processes
def test_held_out_answers_are_right_and_drafts_are_accepted(
    requests: list[dict[str, Any]], run: Run
) -> None:
    builder = PromptBuilder(DIRECTORY, worker=False)
    wrong = []
    for request, ids in zip(requests, run.tokens, strict=True):
        chat = ChatRequest.from_inputs(messages=request["messages"], tools=request.get("tools"))
        output = OutputProcessor(builder.tokenizer, builder.from_chat(chat).options)
        delta = output.push(ids, "stop")
        answer = {
            "content": delta.text,
            "tool_calls": list(delta.tool_calls),
            "finish_reason": delta.finish_reason,
        }
        if not (evaluate.is_closed(answer) and evaluate.is_right(request, answer)):
            wrong.append((request["task"], request["expected"], answer))
    assert len(wrong) <= len(requests) // 10, wrong
    assert run.accepted_length >= 2.5
    assert run.accepted_at(0) >= run.accepted_at(DRAFTS - 1) > 0


@pytest.mark.processes
@torch.inference_mode()
def test_selection_rarely_changes_the_choice(requests: list[dict[str, Any]], run: Run) -> None:
    config = ModelConfig.from_file(DIRECTORY / "config.json")
    twin = Twin(config)
    export.load_weights(twin, DIRECTORY)
    runner = Runner(twin, torch.float32)
    same = []
    for prompt, answer in zip(prompts_of(DIRECTORY, requests), run.tokens, strict=True):
        if len(prompt) <= config.index_topk:
            continue
        ids = torch.tensor([[*prompt.tolist(), *answer]])
        positions = torch.arange(ids.shape[1])[None]
        batch = Batch(ids, positions, torch.zeros_like(ids), torch.zeros(0))
        choices = [
            twin.logits(runner.forward(batch, sparse).hidden)[0, len(prompt) - 1 :].argmax(-1)
            for sparse in (0, 1)
        ]
        same.append(choices[0] == choices[1])
    assert len(same) >= 4
    assert torch.cat(same).float().mean() >= 0.98
