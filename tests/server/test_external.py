# SPDX-License-Identifier: Apache-2.0
"""The model repository under a tritonserver that nothing of ours has started."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from glmserve import env
from glmserve.server.binaries import prepare
from glmserve.server.ports import Ports, choose_ports
from glmserve.server.process_tree import descendants
from glmserve.server.relay import RelayClient
from tests.server.harness import SCRIPTED, wait_until


class External:
    """A tritonserver with settings in config.pbtxt and none in the environment."""

    def __init__(self, repository: Path, log: Path) -> None:
        binaries = prepare()
        self.ports: Ports = choose_ports("127.0.0.1", 0, 0, 0)
        environment = {k: v for k, v in env.child_environment().items() if "GLMSERVE" not in k}
        self.log = log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [
                    str(binaries.executable),
                    f"--model-repository={repository}",
                    f"--backend-directory={binaries.backends}",
                    "--model-control-mode=explicit",
                    "--load-model=ensemble",
                    f"--http-port={self.ports.http}",
                    f"--grpc-port={self.ports.grpc}",
                    f"--metrics-port={self.ports.metrics}",
                    "--exit-timeout-secs=5",
                ],
                env=binaries.environment(environment),
                stdout=output,
                stderr=output,
            )

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.ports.http, timeout=60)
        try:
            connection.request("POST", path, json.dumps(body))
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def ready(self, timeout: float = 60.0) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        connection = http.client.HTTPConnection("127.0.0.1", self.ports.http, timeout=timeout)
        try:
            connection.request("GET", "/v2/models/ensemble/ready")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()


@contextlib.contextmanager
def _external(
    root: Path, checkpoint: Path, tmp_path: Path, **parameters: str
) -> Iterator[External]:
    """A started server whose three models have these `parameters`."""
    repository = tmp_path / "model_repository"
    shutil.copytree(root / "model_repository", repository)
    for model in ("preprocess", "glm_dsa", "postprocess"):
        config = repository / model / "config.pbtxt"
        given = 'key: "checkpoint" value { string_value: '
        text = config.read_text()
        assert f'{given}"" }}' in text
        text = text.replace(f'{given}""', f'{given}"{checkpoint}"')
        for key, value in parameters.items():
            text += f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'
        config.write_text(text)
    server = External(repository, tmp_path / "log")
    try:
        yield server
    finally:
        family = descendants(server.process.pid)
        server.process.terminate()
        server.process.wait(timeout=60)
        wait_until(lambda: not any(p.alive() for p in family), 20.0, "the stubs ended")


@pytest.fixture
def external(root: Path, checkpoint: Path, tmp_path: Path) -> Iterator[External]:
    """A server with scripted tokens, ready."""
    with _external(root, checkpoint, tmp_path, engine=SCRIPTED) as server:
        wait_until(server.ready, 120.0, "the ensemble is ready")
        yield server


def _poll_until_ready(server: External) -> None:
    """Polls as a probe does: the model is never ready before glm_dsa says that it has loaded."""
    path = Path(tempfile.gettempdir(), f"glmserve-{os.geteuid()}-{server.process.pid}")
    relay = RelayClient(path)
    waited = 0  # polls that found the engine loading and the model not ready
    deadline = time.monotonic() + 90.0
    while not server.ready(timeout=0.5):  # the server may answer only once it has loaded
        waited += (relay.ask(op="status") or {}).get("state") == "starting"
        assert time.monotonic() < deadline, server.log.read_text()
        time.sleep(0.05)
    status = relay.ask(op="status")
    relay.close()
    assert status is not None and status["state"] == "ready"
    assert waited > 0


def test_the_model_is_not_ready_until_its_ranks_have_loaded(
    root: Path, checkpoint: Path, tmp_path: Path
) -> None:
    """With the port closed, when the server starts; and with it open, when the model is loaded."""
    with _external(root, checkpoint, tmp_path, ranks="2", device="cpu") as server:
        _poll_until_ready(server)
        unload = {"parameters": {"unload_dependents": True}}
        assert server.post("/v2/repository/models/ensemble/unload", unload)[0] == 200
        wait_until(lambda: not descendants(server.process.pid), 20.0, "the ranks ended")
        assert not server.ready()
        path = "/v2/repository/models/ensemble/load"
        loading = threading.Thread(target=server.post, args=(path, {}))
        loading.start()
        _poll_until_ready(server)
        loading.join(timeout=60.0)
        status, body = server.post(
            "/v2/models/ensemble/generate", {"text_input": "one two", "max_tokens": 3}
        )
        assert status == 200, body


def test_settings_from_config_pbtxt_and_a_second_load(external: External) -> None:
    def ask() -> None:
        request = {"text_input": "one two", "max_tokens": 5}
        status, body = external.post("/v2/models/ensemble/generate", request)
        assert status == 200, body
        assert json.loads(body)["num_output_tokens"] == 5

    ask()
    unload = {"parameters": {"unload_dependents": True}}
    assert external.post("/v2/repository/models/ensemble/unload", unload)[0] == 200
    wait_until(lambda: not descendants(external.process.pid), 60.0, "the stubs ended")
    assert external.post("/v2/repository/models/ensemble/load", {})[0] == 200
    wait_until(external.ready, 60.0, "the ensemble is ready again")
    ask()


def test_a_dead_engine_stops_the_external_server(external: External) -> None:
    family = descendants(external.process.pid)
    body = {"text_input": "x", "stream": True, "max_tokens": 50, "seed": 5}  # Act.DIE
    status, text = external.post("/v2/models/ensemble/generate_stream", body)
    assert status == 200
    assert '"finish_reason":"error"' in text
    external.process.wait(timeout=60)
    wait_until(lambda: not any(p.alive() for p in family), 20.0, "the stubs ended")
    runtime_dir = f"glmserve-{os.geteuid()}-{external.process.pid}"
    assert not Path(tempfile.gettempdir(), runtime_dir).exists()


def test_an_unknown_parameter_in_config_pbtxt_is_named(
    root: Path, checkpoint: Path, tmp_path: Path
) -> None:
    repository = tmp_path / "model_repository"
    shutil.copytree(root / "model_repository", repository)
    config = repository / "postprocess" / "config.pbtxt"
    config.write_text(
        config.read_text() + 'parameters { key: "chekpoint" value { string_value: "x" } }\n'
    )
    server = External(repository, tmp_path / "log")
    assert server.process.wait(timeout=60) != 0
    assert "chekpoint" in server.log.read_text()
