# SPDX-License-Identifier: Apache-2.0
"""The whole path with the real engine on eight ranks, against the same prompts run offline."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from glmserve.messages import Request
from glmserve.sampling_params import SamplingParams
from glmserve.text.tokenizer import Tokenizer
from tests.server.harness import (
    Answer,
    BackgroundStreams,
    Server,
    in_parallel,
    in_parallel_aio,
    offline_tokens,
    wait_until,
)

STREAMS = 16
TOKENS = 200
RANKS = 8
GREEDY = {"stream": True, "max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}


def _prompts() -> list[str]:
    return [f"{'Once upon a time ' * (i % 5)}request {i} asks:" for i in range(STREAMS)]


@pytest.fixture(scope="module")
def offline(checkpoint: Path, tokenizer: Tokenizer) -> dict[str, list[int]]:
    """Greedy tokens of every prompt from one rank, without the server."""
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    prompts = _prompts()
    return offline_tokens(checkpoint, [Request(p, tokenizer.encode(p), sampling) for p in prompts])


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Server]:
    options = ["--checkpoint", str(checkpoint), "--ranks", str(RANKS), "--device", "cpu"]
    with Server(*options) as server:
        yield server


def _check(answers: list[Answer], tokenizer: Tokenizer, offline: dict[str, list[int]]) -> None:
    for prompt, got in zip(_prompts(), answers, strict=True):
        got.check_stream(len(tokenizer.encode(prompt)), TOKENS)
        assert got.text == tokenizer.decode(offline[prompt])
        assert got.finish_reason == "length"


def test_sixteen_streams_over_every_protocol_equal_offline(
    server: Server, tokenizer: Tokenizer, offline: dict[str, list[int]]
) -> None:
    """All at the same time: gRPC, gRPC aio, generate_stream and generate, four each."""
    prompts = _prompts()
    aio: list[Answer] = []
    calls: list[Callable[[], Answer]] = []
    calls += [lambda p=p: server.grpc_stream(text_input=p, **GREEDY) for p in prompts[:4]]
    calls += [lambda p=p: server.generate_stream(text_input=p, **GREEDY) for p in prompts[4:8]]
    calls += [lambda p=p: _generate(server, p) for p in prompts[8:12]]

    def run_aio() -> Answer:
        requests = [{"text_input": p, **GREEDY} for p in prompts[12:]]
        aio.extend(in_parallel_aio(server, requests))
        return Answer()

    answers = in_parallel([*calls, run_aio])[:-1] + aio
    _check(answers, tokenizer, offline)
    assert [got.finals for got in answers[:4] + aio] == [1] * 8


def _generate(server: Server, prompt: str) -> Answer:
    status, body = server.generate(text_input=prompt, **GREEDY | {"stream": False})
    assert status == 200, body
    return Answer([body])


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["grpc", "aio", "http", "generate"])
def test_sixteen_streams_over_one_protocol_equal_offline(
    server: Server, tokenizer: Tokenizer, offline: dict[str, list[int]], protocol: str
) -> None:
    calls: dict[str, Callable[[str], Answer]] = {
        "grpc": lambda p: server.grpc_stream(text_input=p, **GREEDY),
        "http": lambda p: server.generate_stream(text_input=p, **GREEDY),
        "generate": lambda p: _generate(server, p),
    }
    if protocol == "aio":
        answers = in_parallel_aio(server, [{"text_input": p, **GREEDY} for p in _prompts()])
    else:
        answers = in_parallel([lambda p=p: calls[protocol](p) for p in _prompts()])
    _check(answers, tokenizer, offline)
    if protocol in ("grpc", "aio"):
        assert [got.finals for got in answers] == [1] * STREAMS


def test_sigterm_with_sixteen_streams_and_after_failed_requests(server: Server) -> None:
    """Ends the module's server: the last test that uses it."""
    for _ in range(3):
        assert server.generate(text_input="x", top_p=0.0)[0] == 400
    long = {"text_input": "x", **GREEDY, "max_tokens": 3000}
    streams = BackgroundStreams(server, [long] * STREAMS)
    wait_until(lambda: server.status()["running"] == STREAMS, 20.0, "sixteen streams run")
    assert server.stop() < 10.0
    for got in streams.join(60.0):
        assert (got.error, got.finish_reason, got.finals) == ("", "abort", 1)


def test_killing_the_last_rank_ends_running_requests_with_an_error(checkpoint: Path) -> None:
    with Server("--checkpoint", str(checkpoint), "--ranks", "2", "--device", "cpu") as server:
        long = {"text_input": "x", **GREEDY, "max_tokens": 3000}
        with contextlib.ExitStack() as stack:
            streams = [stack.enter_context(server.open_stream(**long)) for _ in range(3)]
            for stream in streams:
                stream.read()
            ranks = [
                process.pid
                for process in server.family
                if b"glmserve.runtime.rank" in Path(f"/proc/{process.pid}/cmdline").read_bytes()
            ]
            assert len(ranks) == 2
            os.kill(max(ranks), signal.SIGKILL)
            for stream in streams:
                stream.read_to_end()
                got = stream.answer
                assert (got.error, got.finish_reason, got.finals) == ("", "error", 1)
        assert server.process.wait(timeout=60.0) == 1
        assert "signal 9" in server.log_text
        server.check_nothing_left()
