# SPDX-License-Identifier: Apache-2.0
"""Starts `glmserve serve` as a user does, speaks its protocols, and looks at what it leaves."""

from __future__ import annotations

import asyncio
import http.client
import json
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import tritonclient.grpc as grpc_client
import tritonclient.grpc.aio as grpc_aio

from glmserve import env
from glmserve.config import engine_config_from_env
from glmserve.engine.client import EngineClient
from glmserve.messages import Request
from glmserve.server.process_tree import Process, descendants
from glmserve.server.relay import RelayClient
from glmserve.server.tensors import MODELS

SCRIPTED = f"{Path(__file__).parent / 'scripted_engine.py'}:ScriptedEngine"
_NUMPY = {"STRING": np.object_, "BOOL": np.bool_, "FP32": np.float32}
_NUMPY |= {"INT32": np.int32, "UINT32": np.uint32, "UINT64": np.uint64}


def wait_until(what: Callable[[], bool], seconds: float, reason: str) -> None:
    """Returns once `what` holds; fails the test after `seconds`."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, f"not within {seconds} s: {reason}"
        time.sleep(0.02)


@dataclass
class Answer:
    """Everything that one request got back."""

    responses: list[dict[str, Any]] = field(default_factory=list)  # data responses, in order
    finals: int = 0  # responses that carry the final flag (gRPC only)
    error: str = ""

    @property
    def text(self) -> str:
        return "".join(response["text_output"] for response in self.responses)

    @property
    def finish_reason(self) -> str:
        return str(self.responses[-1]["finish_reason"])

    def check_stream(self, input_tokens: int, output_tokens: int) -> None:
        """What every complete stream keeps, whatever its text."""
        assert self.error == ""
        assert [r["index"] for r in self.responses] == list(range(len(self.responses)))
        assert len({r["request_uid"] for r in self.responses}) == 1
        assert re.fullmatch("[0-9a-f]{32}", self.responses[0]["request_uid"])
        assert all(r["finish_reason"] == "" for r in self.responses[:-1])
        assert {r["num_input_tokens"] for r in self.responses} == {input_tokens}
        assert sum(r["num_output_tokens"] for r in self.responses) == output_tokens


class Server:
    """A running `glmserve serve`, ready when made."""

    def __init__(self, *options: str, wait: bool = True, **settings: str) -> None:
        environment = env.child_environment(settings)
        command = [sys.executable, "-m", "glmserve.cli", "serve", *options]
        for name in ("http", "grpc", "metrics"):
            command += [f"--{name}-port", "0"]
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.lines: queue.Queue[str] = queue.Queue()
        self.log: list[str] = []
        for pipe in (self.process.stdout, self.process.stderr):
            threading.Thread(target=self._collect, args=(pipe,), daemon=True).start()
        self.http_port = self.grpc_port = self.metrics_port = 0
        self.family: list[Process] = []
        self.curl = ""
        if wait:
            self.wait_ready()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _collect(self, pipe: Any) -> None:
        for line in pipe:
            self.log.append(line)
            self.lines.put(line)

    def wait_ready(self, seconds: float = 120.0) -> None:
        deadline = time.monotonic() + seconds
        while not self.http_port:
            assert self.process.poll() is None, "".join(self.log)
            assert time.monotonic() < deadline, "".join(self.log)
            try:
                line = self.lines.get(timeout=0.2)
            except queue.Empty:
                continue
            where = r"[\d.]+:(\d+)"
            if ready := re.match(f"ready: http {where}, grpc {where}, metrics {where}", line):
                self.http_port, self.grpc_port, self.metrics_port = map(int, ready.groups())
        wait_until(lambda: any("curl" in line for line in self.log), 5.0, "the curl line")
        self.curl = next(line for line in self.log if "curl" in line).strip()
        self.family = descendants(self.process.pid)

    @property
    def log_text(self) -> str:
        return "".join(self.log)

    def tritonserver_pid(self) -> int:
        for process in descendants(self.process.pid):
            if Path(f"/proc/{process.pid}/comm").read_text().strip() == "tritonserver":
                return process.pid
        raise AssertionError("no tritonserver below the launcher")

    def runtime_dir(self) -> Path:
        environ = Path(f"/proc/{self.tritonserver_pid()}/environ").read_bytes().split(b"\0")
        name = env.RUNTIME_DIR.name.encode() + b"="
        return Path(next(e.removeprefix(name) for e in environ if e.startswith(name)).decode())

    def relay(self) -> RelayClient:
        return RelayClient(self.runtime_dir())

    def status(self) -> dict[str, Any]:
        relay = self.relay()
        status = relay.ask(op="status")
        relay.close()
        assert status is not None
        return status

    def stop(self, number: int = signal.SIGTERM) -> float:
        """Sends the signal and waits; returns the seconds it took. Nothing may be left."""
        self.family = descendants(self.process.pid)
        runtime_dir, started = self.runtime_dir(), time.monotonic()
        self.process.send_signal(number)
        code = self.process.wait(timeout=30.0)
        seconds = time.monotonic() - started
        assert code == 0, self.log_text
        self.check_nothing_left()
        assert not runtime_dir.exists()
        return seconds

    def check_nothing_left(self) -> None:
        assert [process for process in self.family if process.alive()] == []
        assert list(Path("/dev/shm").glob(f"glmserve-{self.process.pid}-*")) == []

    def kill(self) -> None:
        """For teardown: stops it however it is."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout=20.0)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    # -- HTTP -----------------------------------------------------------------------------------

    def _http(
        self, method: str, path: str, body: str | None = None, port: int = 0
    ) -> tuple[int, str]:
        port = port or self.http_port
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        try:
            connection.request(method, path, body)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def ready(self, model: str = "ensemble") -> bool:
        return self._http("GET", f"/v2/models/{model}/ready")[0] == 200

    def metrics(self) -> dict[str, float]:
        """The series of glm_dsa on the metrics port: `name` or `name{label="value"}` -> value.

        The labels that all of them have are checked and left out.
        """
        _, text = self._http("GET", "/metrics", port=self.metrics_port)
        series: dict[str, float] = {}
        for line in text.splitlines():
            if found := re.fullmatch(r"glm_dsa:(\w+)\{(.*)\} (\S+)", line):
                labels = found[2].split(",")
                assert {'model="glm_dsa"', 'version="1"'} <= set(labels), line
                own = [label for label in labels if label.split("=")[0] not in ("model", "version")]
                name = found[1] + ("{" + ",".join(own) + "}" if own else "")
                assert name not in series, line
                series[name] = float(found[3])
        return series

    def settled_metrics(self) -> dict[str, float]:
        """`metrics` of an idle server, once both the stage and the engine have reported."""
        deadline, before = time.monotonic() + 30.0, {"": 0.0}
        while before != (now := self.metrics()):
            assert time.monotonic() < deadline, "the metrics never come to rest"
            before = now
            time.sleep(1.1)  # they are renewed twice a second
        return now

    def generate(self, **body: Any) -> tuple[int, dict[str, Any]]:
        status, text = self._http("POST", "/v2/models/ensemble/generate", json.dumps(body))
        parsed: dict[str, Any] = json.loads(text)
        return status, parsed

    def generate_stream(self, **body: Any) -> Answer:
        path = "/v2/models/ensemble/generate_stream"
        _, text = self._http("POST", path, json.dumps({"stream": True, **body}))
        answer = Answer()
        for line in text.split("\n"):
            if line.startswith("data: "):
                data = json.loads(line.removeprefix("data: "))
                if "error" in data:
                    answer.error = data["error"]
                else:
                    answer.responses.append(data)
        return answer

    # -- gRPC -----------------------------------------------------------------------------------

    def open_stream(self, model: str = "ensemble", **tensors: Any) -> OpenStream:
        return OpenStream(self.grpc_port, model, tensors)

    def grpc_stream(self, model: str = "ensemble", **tensors: Any) -> Answer:
        """Sends one request on a stream of its own and waits for its end."""
        with self.open_stream(model, **tensors) as stream:
            stream.read_to_end()
        return stream.answer

    async def grpc_aio_stream(self, model: str = "ensemble", **tensors: Any) -> Answer:
        client = grpc_aio.InferenceServerClient(f"127.0.0.1:{self.grpc_port}")

        async def requests() -> Any:
            yield {
                "model_name": model,
                "inputs": inputs(model, tensors, grpc_aio),
                "enable_empty_final_response": True,
            }

        answer = Answer()
        try:
            async for result, error in client.stream_infer(requests()):
                add_response(answer, model, result, error)
        finally:
            await client.close()
        return answer


class OpenStream:
    """One request on a gRPC stream of its own."""

    def __init__(self, port: int, model: str, tensors: Mapping[str, Any]) -> None:
        self.answer = Answer()
        self._model = model
        self._results: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self._client = grpc_client.InferenceServerClient(f"127.0.0.1:{port}")
        self._client.start_stream(lambda result, error: self._results.put((result, error)))
        self._client.async_stream_infer(
            model, inputs(model, tensors), enable_empty_final_response=True
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.stop_stream()
        self._client.close()

    def read(self) -> None:
        """Takes the next response into `answer`."""
        result, error = self._results.get(timeout=60)
        add_response(self.answer, self._model, result, error)

    def read_to_end(self) -> None:
        while self.answer.finals == 0 and not self.answer.error:
            self.read()
        time.sleep(0.05)  # a second final would come now
        while not self._results.empty():
            self.read()

    def cancel(self) -> None:
        self._client.stop_stream(cancel_requests=True)


def offline_tokens(checkpoint: Path, requests: Iterable[Request]) -> dict[str, list[int]]:
    """What one rank without a server gives, by uid."""
    client = EngineClient.start(
        engine_config_from_env(checkpoint=str(checkpoint), device="cpu", ranks=1)
    )
    tokens: dict[str, list[int]] = {}
    try:
        for request in requests:
            tokens[request.uid] = []
            client.submit(request)
        running = set(tokens)
        while running:
            for chunk in client.receive():
                tokens[chunk.uid] += chunk.token_ids
                if chunk.finish_reason is not None:
                    running.remove(chunk.uid)
    finally:
        client.close()
    return tokens


def inputs(model: str, tensors: Mapping[str, Any], client: Any = grpc_client) -> list[Any]:
    """The model's input tensors from plain values by name."""
    table = {tensor.name: tensor for tensor in MODELS[model].inputs}
    made = []
    for name, value in tensors.items():
        values = value if isinstance(value, list | np.ndarray) else [value]
        dtype = table[name].dtype
        if dtype == "STRING":
            values = [item.encode() for item in values]
        array = np.array(values, dtype=_NUMPY[dtype])
        triton_dtype = "BYTES" if dtype == "STRING" else dtype
        tensor = client.InferInput(name, list(array.shape), triton_dtype)
        tensor.set_data_from_numpy(array)
        made.append(tensor)
    return made


def add_response(answer: Answer, model: str, result: Any, error: Any) -> None:
    if error is not None:
        answer.error = str(error)
        return
    response = result.get_response()
    answer.finals += response.parameters["triton_final_response"].bool_param
    if not response.outputs:
        return
    values: dict[str, Any] = {}
    for tensor in MODELS[model].outputs:
        array = result.as_numpy(tensor.name)
        if array is None:
            continue
        items = array.reshape(-1).tolist()
        if tensor.dtype == "STRING":
            items = [item.decode() for item in items]
        one = len(items) == 1 and tensor.name != "output_ids"
        values[tensor.name] = items[0] if one else items  # as the JSON of HTTP
    answer.responses.append(values)


def in_parallel(calls: list[Callable[[], Answer]]) -> list[Answer]:
    """Runs the calls at the same time, one thread each; returns their answers in order."""
    answers: list[Answer | BaseException] = [Answer()] * len(calls)

    def run(index: int) -> None:
        try:
            answers[index] = calls[index]()
        except BaseException as error:
            answers[index] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return [answer for answer in answers if isinstance(answer, Answer)]


def in_parallel_aio(server: Server, requests: list[dict[str, Any]]) -> list[Answer]:
    async def run() -> list[Answer]:
        return await asyncio.gather(*(server.grpc_aio_stream(**request) for request in requests))

    return asyncio.run(run())


class BackgroundStreams:
    """Streams that run while a test does something else."""

    def __init__(self, server: Server, requests: list[dict[str, Any]]) -> None:
        self.answers: list[Answer] = []
        calls = [lambda r=r: server.grpc_stream(**r) for r in requests]
        self._thread = threading.Thread(target=lambda: self.answers.extend(in_parallel(calls)))
        self._thread.start()

    def join(self, seconds: float) -> list[Answer]:
        self._thread.join(timeout=seconds)
        assert not self._thread.is_alive(), "the streams did not end"
        return self.answers
