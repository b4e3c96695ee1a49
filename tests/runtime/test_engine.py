# SPDX-License-Identifier: Apache-2.0
"""The real engine with real ranks on CPU: equalities of DESIGN §4 in fp64, and what goes wrong."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from glmserve.checkpoint.synthetic import make_checkpoint
from glmserve.config import EngineConfig
from glmserve.engine.client import EngineClient
from glmserve.errors import ConfigError, EngineError, InvalidInput
from glmserve.messages import Chunk, DraftScript, Request
from glmserve.runtime.step import LOAD_PERIOD
from glmserve.sampling_params import SamplingParams
from tests.tolerances import assert_close

# Their answers pass the preset's index_topk (16), stay within the first page beyond it, pass the
# end of that page, pass that of the second.
LENGTHS = (5, 25, 55, 120)
NEW = 16
BATCH = 18  # a request and 17 others
EXPERTS = 16  # of the preset

Engine = Callable[..., EngineClient]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    make_checkpoint(directory, "tiny", 3)
    return directory


@pytest.fixture
def start(checkpoint: Path) -> Iterator[Engine]:
    """Starts engines; closes them at the end and checks that none of their processes is left."""
    clients: list[EngineClient] = []

    def factory(**settings: object) -> EngineClient:
        values = {"checkpoint": str(checkpoint), "num_pages": 64, "max_rows": BATCH} | settings
        client = EngineClient.start(EngineConfig(**values))  # type: ignore[arg-type]
        clients.append(client)
        shares = zip(client.info.parameter_bytes, client.info.share_bytes, strict=True)
        assert len(client.info.parameter_bytes) == settings.get("ranks", 1)
        assert all(abs(loaded - share) <= 0.01 * share for loaded, share in shares)
        return client

    yield factory
    for client in clients:
        client.close()
        for pid in (client.info.engine_pid, *client.info.rank_pids):
            assert not Path(f"/proc/{pid}").exists()


def requests() -> list[Request]:
    """Greedy, seeded and shaped requests of several lengths."""
    generator = np.random.default_rng(0)
    shaped = SamplingParams(
        max_tokens=NEW,
        temperature=0.7,
        min_p=0.02,
        seed=9,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        repetition_penalty=1.3,
        logit_bias=((11, 4.0), (12, 4.0)),
        bad_word_ids=((11, 12), (12, 11)),
        min_tokens=NEW,
        logprobs=2,
    )
    made = [
        Request(f"s{i}", generator.integers(0, 900, length).astype(np.int32), shaped)
        for i, length in enumerate((20, 90))
    ]
    for i, length in enumerate(LENGTHS * 2):
        greedy = i < len(LENGTHS)
        sampling = SamplingParams(
            max_tokens=NEW,
            temperature=0.0 if greedy else 0.8,
            top_p=1.0 if greedy else 0.9,
            top_k=0 if greedy else 40,
            seed=None if greedy else 100 + i,
            ignore_eos=True,
        )
        prompt = generator.integers(0, 900, length).astype(np.int32)
        made.append(Request(f"r{i}", prompt, sampling))
    return made


def companions() -> list[Request]:
    """Short requests that fill the batch, so that each of `requests()` has 17 others beside it."""
    generator = np.random.default_rng(1)
    return [
        Request(
            f"c{i}",
            generator.integers(0, 900, 3 + i).astype(np.int32),
            SamplingParams(max_tokens=NEW, temperature=0.9, seed=i, ignore_eos=True),
        )
        for i in range(BATCH - len(requests()))
    ]


def collect(
    client: EngineClient, uids: list[str], timeout: float = 120.0
) -> dict[str, list[Chunk]]:
    """Receives until every uid has its last chunk."""
    chunks: dict[str, list[Chunk]] = {uid: [] for uid in uids}
    deadline = time.monotonic() + timeout
    while not all(got and got[-1].finish_reason for got in chunks.values()):
        assert time.monotonic() < deadline, "no end within the time"
        for chunk in client.receive(5.0):
            chunks[chunk.uid].append(chunk)
    return chunks


def tokens_of(client: EngineClient, batch: bool) -> dict[str, list[int]]:
    """Tokens of `requests()`, all at once in a full batch or one after the other."""
    made = requests()
    groups = [made + companions()] if batch else [[request] for request in made]
    tokens: dict[str, list[int]] = {}
    for group in groups:
        for request in group:
            client.submit(request)
        for uid, chunks in collect(client, [r.uid for r in group]).items():
            assert [chunk.number for chunk in chunks] == list(range(len(chunks)))
            tokens[uid] = [token for chunk in chunks for token in chunk.token_ids]
            assert chunks[-1].finish_reason == "length"
            assert chunks[-1].num_output_tokens == len(tokens[uid]) == NEW
    return {request.uid: tokens[request.uid] for request in made}


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> dict[str, list[int]]:
    """One rank, one request at a time, the prompt in one chunk, no drafts."""
    client = EngineClient.start(EngineConfig(str(checkpoint), num_pages=64, max_rows=8))
    try:
        return tokens_of(client, batch=False)
    finally:
        client.close()


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="batched"),
        pytest.param({"chunk": 7, "page_seed": 5}, id="chunk-7-permuted-pages"),
        # Beside decoding rows a prompt gets one row a step.
        pytest.param({"chunk": 3, "drafts": 1, "steps_in_flight": 1}, id="chunk-3-one-in-flight"),
        pytest.param({"chunk": 64, "drafts": 2}, id="chunk-64-drafts-2"),
        pytest.param({"num_pages": 8}, id="preempted"),
        pytest.param({"drafts": 3, "chunk": 16}, id="drafts-3-chunk-16"),
        pytest.param(
            {"drafts": 5, "share_draft_index": False, "max_rows": 8}, id="drafts-5-own-index"
        ),
        pytest.param({"ranks": 2, "collectives": "gloo"}, id="2-ranks-gloo"),
        pytest.param({"ranks": 8, "expert_layout": "sliced", "drafts": 2}, id="8-ranks-sliced"),
        # What these two would find, eight ranks behind the server and two of `logits` find too.
        pytest.param({"ranks": 8, "chunk": 50}, id="8-ranks", marks=pytest.mark.slow),
        pytest.param(
            {"ranks": 2, "expert_layout": "sliced"}, id="2-ranks-sliced", marks=pytest.mark.slow
        ),
    ],
)
def test_tokens_do_not_depend_on_how_they_are_computed(
    start: Engine, alone: dict[str, list[int]], settings: dict[str, object]
) -> None:
    assert tokens_of(start(**settings), batch=True) == alone


def test_target_passes_follow_the_accepted_drafts(
    start: Engine, alone: dict[str, list[int]]
) -> None:
    client = start(drafts=3)
    for wrong_at, confirmed in ((None, 4), (2, 3), (1, 2), (0, 1)):
        made = [
            dataclasses.replace(
                request,
                draft_script=DraftScript(np.asarray(alone[request.uid], dtype=np.int32), wrong_at),
            )
            for request in requests()
        ]
        for request in made:
            client.submit(request)
        for uid, chunks in collect(client, [r.uid for r in made]).items():
            assert [token for chunk in chunks for token in chunk.token_ids] == alone[uid]
            # The prefill gives one token, each later pass the accepted drafts and one more.
            assert len(chunks) == 1 + -(-(NEW - 1) // confirmed)


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_prefix_hit_changes_nothing(
    start: Engine, alone: dict[str, list[int]], drafts: int
) -> None:
    client = start(drafts=drafts, chunk=50, num_pages=128)
    assert tokens_of(client, batch=True) == alone
    made = requests()
    for request in made:
        client.submit(request)
    chunks = collect(client, [request.uid for request in made])
    for request in made:
        got = chunks[request.uid]
        assert [token for chunk in got for token in chunk.token_ids] == alone[request.uid]
        assert got[-1].num_cached_tokens == (len(request.prompt) - 1) // 64 * 64


def test_drafts_after_a_prefix_hit_equal_cold_ones(start: Engine, tmp_path: Path) -> None:
    client = start(drafts=2, capture_dir=str(tmp_path))
    prompt = np.random.default_rng(2).integers(0, 900, 130).astype(np.int32)
    drafted = []
    for uid in ("cold", "hit"):
        client.submit(Request(uid, prompt, SamplingParams(max_tokens=1, temperature=0.0)))
        assert collect(client, [uid])[uid][-1].num_cached_tokens == (128 if uid == "hit" else 0)
        last = max(tmp_path.glob("step-*.npz"))
        with np.load(last) as arrays:
            drafted.append(arrays["mtp_draft_logits_share1"][0])
    assert_close("draft logits", drafted[0], drafted[1], "same_fp64")


def test_expert_load_counts_the_choices_that_were_made(start: Engine, tmp_path: Path) -> None:
    client = start(ranks=2, capture_dir=str(tmp_path))
    for request in requests()[:3]:  # a bucket of four places: one of them is padding
        client.submit(request)
    collect(client, [request.uid for request in requests()[:3]])
    time.sleep(LOAD_PERIOD)
    client.submit(Request("last", np.arange(9, dtype=np.int32), SamplingParams(max_tokens=1)))
    collect(client, ["last"])  # its only step reports
    by_rank = np.zeros(2, dtype=int)
    for path in tmp_path.glob("step-*.npz"):
        with np.load(path) as step:
            experts = step["router_experts"]  # [layers, rows, k] of the tiny preset's 16
        by_rank += np.bincount(experts.flatten() // (EXPERTS // 2), minlength=2)
    deadline = time.monotonic() + 60.0
    while client.stats is None or client.stats.expert_tokens_by_rank != tuple(by_rank):
        assert time.monotonic() < deadline, (client.stats, by_rank)
        time.sleep(0.02)
    assert client.stats.expert_imbalance > client.stats.rank_imbalance >= 1.0


def test_a_rank_that_dies_ends_running_requests_with_an_error(start: Engine) -> None:
    client = start(ranks=2, num_pages=128)
    prompt = np.arange(40, dtype=np.int32)
    client.submit(Request("a", prompt, SamplingParams(max_tokens=3000, ignore_eos=True)))
    while not client.receive(10.0):
        pass
    os.kill(client.info.rank_pids[-1], signal.SIGKILL)
    last = collect(client, ["a"], 60.0)["a"][-1]  # its peers alone would wait for minutes
    assert (last.finish_reason, last.error_code) == ("error", "INTERNAL")
    assert "rank 1 died (signal 9)" in last.error
    with pytest.raises(EngineError, match="rank 1 died"):
        client.receive(10.0)
    with pytest.raises(EngineError, match="rank 1 died"):
        client.submit(Request("b", prompt, SamplingParams(max_tokens=1)))


def test_a_rank_that_dies_while_idle_is_noticed(start: Engine) -> None:
    client = start(ranks=2)
    os.kill(client.info.rank_pids[0], signal.SIGKILL)
    with pytest.raises(EngineError, match="rank 0 died"):
        client.receive(10.0)


def test_cancel_ends_one_request_and_leaves_the_others(
    start: Engine, alone: dict[str, list[int]]
) -> None:
    client = start(num_pages=128)
    long = Request("long", np.arange(9, dtype=np.int32), SamplingParams(max_tokens=4000, seed=1))
    client.submit(long)
    made = requests()
    for request in made:
        client.submit(request)
    client.cancel("long")
    chunks = collect(client, ["long", *(r.uid for r in made)])
    assert chunks["long"][-1].finish_reason == "abort"
    for request in made:
        got = [token for chunk in chunks[request.uid] for token in chunk.token_ids]
        assert got == alone[request.uid]


@pytest.mark.parametrize(
    ("prompt", "sampling", "field"),
    [
        ([], {}, "input_ids"),
        ([5, -1], {}, "input_ids"),
        ([5, 1024], {}, "input_ids"),
        ([5] * 5000, {}, "prompt"),
        ([5], {"max_tokens": 4096}, "max_tokens"),
        ([5], {"stop_token_ids": (99999,)}, "stop_token_ids"),
    ],
)
def test_bad_requests_are_refused_before_they_reach_the_engine(
    shared: EngineClient, prompt: list[int], sampling: dict[str, object], field: str
) -> None:
    request = Request("x", np.asarray(prompt, dtype=np.int32), SamplingParams(**sampling))  # type: ignore[arg-type]
    with pytest.raises(InvalidInput) as error:
        shared.submit(request)
    assert error.value.field == field


@pytest.fixture(scope="module")
def shared(checkpoint: Path) -> Iterator[EngineClient]:
    client = EngineClient.start(EngineConfig(str(checkpoint), num_pages=128))
    yield client
    client.close()


def test_a_rank_that_cannot_load_says_why(checkpoint: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(checkpoint, broken)
    index = json.loads((broken / "model.safetensors.index.json").read_text())
    shard = broken / index["weight_map"]["model.norm.weight"]
    tensors = load_file(shard)
    del tensors["model.norm.weight"]
    save_file(tensors, shard)
    with pytest.raises(EngineError, match=r"(?s)rank \d died.*model\.norm\.weight"):
        EngineClient.start(EngineConfig(str(broken), ranks=2))


def test_settings_that_do_not_fit_the_checkpoint_are_named(checkpoint: Path) -> None:
    for settings, key in (
        ({"max_model_len": 1 << 30}, "max_model_len"),
        ({"max_model_len": 4000, "num_pages": 4}, "max_model_len"),
    ):
        with pytest.raises(EngineError, match=key):
            EngineClient.start(EngineConfig(str(checkpoint), **settings))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="ranks"):
        EngineConfig(str(checkpoint), ranks=3)
