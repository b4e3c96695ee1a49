# SPDX-License-Identifier: Apache-2.0
"""Two minutes of 64 clients, some of which leave or send nonsense: answers stay right and nothing
stays behind. Eight ranks on a small model; the clients are in one thread, to fit two cores."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc.aio as grpc_aio

from glmserve.generation_config import GenerationConfig
from glmserve.messages import Request
from glmserve.sampling_params import SamplingParams
from glmserve.server.process_tree import descendants
from glmserve.text.tokenizer import Tokenizer
from tests.server.harness import Answer, Server, add_response, inputs, offline_tokens

CLIENTS = 64
SECONDS = 120.0
LONG = 160  # tokens of a request whose client leaves before its end
SHORT = (1, 24)
PROMPTS = 16
CANCELLED, INVALID = 0.20, 0.05
# Bytes that processes may have grown between the load's third and last quarter. All ranks run the
# same program, so what one of them keeps the others keep; each one's heap moves by up to 2.4 MB.
GROWTH, GROWTH_OF_ONE = 1 << 20, 4 << 20
INVALID_REQUESTS: tuple[dict[str, Any], ...] = (
    {"text_input": "x", "top_p": 0.0},
    {"text_input": ""},
    {"text_input": "x", "max_tokens": 1 << 30},
    {"messages": "[{"},
    {"text_input": "x", "sampling_parameters": '{"n": 0}'},
)


def _prompt(i: int) -> str:
    return f"{'On the road again ' * (6 * (i % 4))}question {i}:"


def _sampling(i: int) -> dict[str, Any]:
    """Half of the prompts are sampled, each with its own seed."""
    return {"temperature": float(i % 2), "seed": i, "ignore_eos": True}


@pytest.fixture(scope="module")
def offline(checkpoint: Path, tokenizer: Tokenizer) -> list[list[int]]:
    """The first LONG tokens of every prompt from one rank, without the server."""
    defaults = GenerationConfig.from_directory(checkpoint).sampling  # as the server has them

    def request(i: int) -> Request:
        settings = {"max_tokens": LONG, **_sampling(i)}
        sampling = SamplingParams.from_mapping(settings, defaults)
        return Request(str(i), tokenizer.encode(_prompt(i)), sampling)

    tokens = offline_tokens(checkpoint, map(request, range(PROMPTS)))
    return [tokens[str(i)] for i in range(PROMPTS)]


class Load:
    """The clients, and what they found."""

    def __init__(self, server: Server, tokenizer: Tokenizer, offline: list[list[int]]) -> None:
        self.server = server
        self.tokenizer = tokenizer
        self.offline = offline
        self.sent: Counter[str] = Counter()
        self.wrong: list[Any] = []  # prompt, tokens, cached, expected and given text

    async def run(self) -> None:
        deadline = time.monotonic() + SECONDS
        await asyncio.gather(*(self._client(i, deadline) for i in range(CLIENTS)))

    async def _client(self, number: int, deadline: float) -> None:
        draw = random.Random(number)
        client = grpc_aio.InferenceServerClient(f"127.0.0.1:{self.server.grpc_port}")
        try:
            while time.monotonic() < deadline:
                kind = draw.random()
                if kind < INVALID:
                    await self._invalid(client, draw.choice(INVALID_REQUESTS))
                elif kind < INVALID + CANCELLED:
                    await self._leave(client, draw.randrange(PROMPTS), draw.randint(1, 4))
                else:
                    await self._whole(client, draw.randrange(PROMPTS), draw.randint(*SHORT))
        finally:
            await client.close()

    async def _send(self, client: Any, tensors: dict[str, Any], leave_after: int = 0) -> Answer:
        """One request; the client cancels it after `leave_after` data responses, if given."""

        async def requests() -> Any:
            yield {
                "model_name": "ensemble",
                "inputs": inputs("ensemble", tensors, grpc_aio),
                "enable_empty_final_response": True,
            }

        answer = Answer()
        stream = client.stream_infer(requests())
        try:
            async with asyncio.timeout(60.0):
                async for result, error in stream:
                    add_response(answer, "ensemble", result, error)
                    if leave_after and len(answer.responses) >= leave_after:
                        stream.cancel()
                        break
        finally:
            stream.cancel()
        return answer

    async def _invalid(self, client: Any, request: dict[str, Any]) -> None:
        got = await self._send(client, {**request, "stream": True})
        assert got.error and not got.responses, request
        self.sent["invalid"] += 1

    async def _whole(self, client: Any, i: int, length: int) -> None:
        request = {"text_input": _prompt(i), "stream": True, "max_tokens": length, **_sampling(i)}
        got = await self._send(client, request)
        got.check_stream(len(self.tokenizer.encode(_prompt(i))), length)
        assert (got.finish_reason, got.finals) == ("length", 1)
        expected = self.tokenizer.decode(self.offline[i][:length])
        if got.text != expected:
            self.wrong.append(
                (i, length, got.responses[0]["num_cached_tokens"], expected, got.text)
            )
        self.sent["whole"] += 1

    async def _leave(self, client: Any, i: int, after: int) -> None:
        request = {"text_input": _prompt(i), "stream": True, "max_tokens": LONG, **_sampling(i)}
        got = await self._send(client, request, leave_after=after)
        assert self.tokenizer.decode(self.offline[i]).startswith(got.text)
        self.sent["cancelled" if got.finals == 0 else "too late"] += 1


class MemoryWatch:
    """Resident bytes of the stubs, the engine and the ranks, every second from a thread. Without
    shared ones: a ring's pages count once they have been written, until it has come round."""

    def __init__(self, server: Server) -> None:
        self.samples: dict[str, list[int]] = {}
        self._pids = {}
        for process in descendants(server.process.pid):
            words = Path(f"/proc/{process.pid}/cmdline").read_bytes().decode().split("\0")
            if words[0].endswith("triton_python_backend_stub") or "glmserve." in " ".join(words):
                self._pids[process.pid] = f"{process.pid} {' '.join(words[:3])}"
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._done.wait(1.0):
            for pid, name in self._pids.items():
                _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
                own = (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
                self.samples.setdefault(name, []).append(own)

    def growth(self) -> dict[str, int]:
        """By process: how much the median of the last quarter is above the third one's."""
        self._done.set()
        self._thread.join()
        grown = {}
        for name, sizes in self.samples.items():
            quarter = len(sizes) // 4
            third, last = sizes[2 * quarter : 3 * quarter], sizes[3 * quarter :]
            grown[name] = int(np.median(last) - np.median(third))
        return grown


def _shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 300)
def test_two_minutes_of_clients_that_finish_leave_or_send_nonsense(
    checkpoint: Path, tokenizer: Tokenizer, offline: list[list[int]]
) -> None:
    options = ["--checkpoint", str(checkpoint), "--ranks", "8", "--device", "cpu"]
    with Server(*options) as server:
        regions = _shared_memory()
        load, memory = Load(server, tokenizer, offline), MemoryWatch(server)
        assert len(memory._pids) == 4 + 1 + 8 + 2, memory._pids  # stubs, engine, ranks, templates
        asyncio.run(load.run())
        growth = memory.growth()
        assert load.wrong == []
        total = sum(load.sent.values())
        assert load.sent["whole"] >= 0.6 * total
        assert load.sent["cancelled"] >= 0.1 * total
        assert load.sent["invalid"] > 0
        assert max(growth.values()) < GROWTH_OF_ONE, growth
        kinds: dict[str, list[int]] = {}
        for name, grown in growth.items():
            kinds.setdefault(name.partition(" ")[2], []).append(grown)
        assert all(np.median(grown) < GROWTH for grown in kinds.values()), growth
        assert server.generate(text_input="x", max_tokens=1)[0] == 200
        metrics = server.settled_metrics()
        assert metrics["num_requests_running"] == metrics["num_requests_waiting"] == 0
        assert metrics["kv_cache_pages_used"] == 0
        status = server.status()
        assert (status["running"], status["unsettled"], status["postprocess"]) == (0, 0, 0)
        assert _shared_memory() <= regions
        server.stop()
