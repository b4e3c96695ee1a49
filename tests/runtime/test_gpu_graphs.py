# SPDX-License-Identifier: Apache-2.0
"""The engine on a GPU with the project's kernels: captured steps draw what eager ones draw.

bf16, the sizes that the kernels serve. Operators promise that a row's bits do not depend on the
rows beside it, so the tokens are demanded to be equal in every bucket and with every number of
drafts, not only close.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from glmserve.checkpoint.synthetic import make_checkpoint
from glmserve.config import EngineConfig
from glmserve.engine.client import EngineClient
from glmserve.messages import Request
from glmserve.sampling_params import SamplingParams
from tests.two_gpus import needs_two_gpus

pytestmark = pytest.mark.gpu

NEW = 40
LENGTHS = (5, 33, 70, 130, 200)


def requests() -> list[Request]:
    """Greedy, plainly sampled, limited and shaped requests, three of each; some report."""
    kinds: list[dict[str, object]] = [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
        {
            "temperature": 0.7,
            "repetition_penalty": 1.3,
            "presence_penalty": 0.4,
            "logit_bias": ((11, 4.0), (12, 4.0)),
            "bad_word_ids": ((11, 12),),
            "min_tokens": NEW,
        },
    ]
    generator = np.random.default_rng(0)
    made = []
    for i in range(12):
        prompt = generator.integers(0, 900, LENGTHS[i % len(LENGTHS)]).astype(np.int32)
        sampling = SamplingParams(
            max_tokens=NEW, seed=100 + i, ignore_eos=True, **kinds[i % len(kinds)]
        )  # type: ignore[arg-type]
        made.append(Request(f"r{i}", prompt, sampling))
    return made


def start(checkpoint: Path, **settings: object) -> EngineClient:
    values = {"device": "cuda", "collectives": "nccl", "dtype": "bf16", "num_pages": 128}
    values |= {"max_rows": 16, "max_model_len": 512}
    return EngineClient.start(EngineConfig(str(checkpoint), **(values | settings)), print)  # type: ignore[arg-type]


def wait_until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5.0
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def tokens_of(client: EngineClient, made: list[Request], together: bool) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for group in [made] if together else [[request] for request in made]:
        for request in group:
            client.submit(request)
            tokens[request.uid] = []
        running = {request.uid for request in group}
        while running:
            chunks = client.receive(60.0)
            assert chunks, "no end within the time"
            for chunk in chunks:
                tokens[chunk.uid] += chunk.token_ids
                if chunk.finish_reason:
                    assert chunk.finish_reason == "length", chunk
                    running.discard(chunk.uid)
    return tokens


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("block")
    make_checkpoint(directory, "block", 1)
    return directory


@pytest.fixture(scope="module")
def eager(checkpoint: Path) -> Iterator[dict[str, list[int]]]:
    """Tokens without graphs and without drafts, all at once."""
    client = start(checkpoint, graphs=False)
    try:
        yield tokens_of(client, requests(), together=True)
    finally:
        client.close()


def test_prefix_hits_and_small_chunks_draw_the_same(
    checkpoint: Path, eager: dict[str, list[int]]
) -> None:
    """Chunks of mixed steps that graphs hold, and prompts that go on from shared pages."""
    client = start(checkpoint, drafts=3, chunk=48)
    try:
        assert tokens_of(client, requests(), together=True) == eager
        assert tokens_of(client, requests(), together=True) == eager
        wait_until(lambda: client.stats is not None and client.stats.cached_tokens > 0)
    finally:
        client.close()


@pytest.mark.parametrize("drafts", [0, 1, 3, 5])
def test_captured_tokens_are_those_of_eager_steps_alone_and_together(
    checkpoint: Path, eager: dict[str, list[int]], drafts: int
) -> None:
    client = start(checkpoint, drafts=drafts)
    try:
        assert tokens_of(client, requests(), together=True) == eager
        assert tokens_of(client, requests(), together=False) == eager
    finally:
        client.close()


@needs_two_gpus
@pytest.mark.parametrize("layout", ["ep", "sliced"])
def test_captured_steps_over_two_gpus_draw_what_eager_ones_draw(
    checkpoint: Path, layout: str
) -> None:
    found = []
    for settings in ({"graphs": False}, {"drafts": 3}):
        client = start(checkpoint, ranks=2, expert_layout=layout, **settings)
        try:
            found.append(tokens_of(client, requests(), together=True))
        finally:
            client.close()
    assert found[0] == found[1]


def test_logprobs_change_no_token(checkpoint: Path, eager: dict[str, list[int]]) -> None:
    """Steps with a row that asks run as two graphs, with all of the sampler."""
    made = requests()
    for i in (0, 1):
        values = made[i].sampling.__dict__ | {"logprobs": 2}
        made[i] = Request(made[i].uid, made[i].prompt, SamplingParams(**values))
    client = start(checkpoint, drafts=3)
    try:
        assert tokens_of(client, made, together=True) == eager
    finally:
        client.close()
