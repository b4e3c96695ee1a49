# SPDX-License-Identifier: Apache-2.0
"""Runs the wheel's tritonserver on model_repository/ as a child, and takes all of it down again.

`EmbeddedServer` starts, watches and stops it; `serve` is the command: progress, ports, signals and
exit code. An external tritonserver needs none of this. Not its job: the binaries (`binaries.py`),
what the models do, and restarting a server that died.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final

import glmserve
from glmserve import env
from glmserve.config import cuda_devices, default_device
from glmserve.errors import ConfigError, GlmServeError
from glmserve.ipc.process import Child, spawn
from glmserve.server.binaries import prepare
from glmserve.server.ports import Ports, choose_ports
from glmserve.server.process_tree import Process, descendants, end_processes
from glmserve.server.relay import RelayClient, read_failure

_EXIT_TIMEOUT: Final = 4  # seconds tritonserver waits for connections and requests that never end
_DRAIN_WAIT: Final = 2.5  # seconds that cancelled requests get to send their last response
_PROJECT: Final = Path(glmserve.__file__).resolve().parents[2]

# What the server says on every machine without a GPU; nothing is wrong.
_HARMLESS: Final = re.compile(
    r"pinned_memory_manager|CudaDriverHelper|unable to create stream for ensemble|"
    r"Timeout \d+: Found|^Signal \(\d+\) received|Non-graceful termination|^\s*$"
)


class ServerFailed(GlmServeError):
    """tritonserver could not start, or ended by itself; the message says why."""


@dataclass(frozen=True)
class ServeOptions:
    """What to serve and where. A port of 0 means any free one."""

    settings: Mapping[str, str] = field(default_factory=dict)  # GLMSERVE_*, over the environment
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    model_repository: Path = _PROJECT / "model_repository"


class EmbeddedServer:
    """One tritonserver with its stubs, engine and ranks. Use as a context manager, or call stop."""

    def __init__(self, options: ServeOptions) -> None:
        """Starts the process; raises PortBusy, BinariesError, or ConfigError for the repository."""
        if not (options.model_repository / "ensemble" / "config.pbtxt").is_file():
            raise ConfigError(
                "model_repository", str(options.model_repository), "has no ensemble/config.pbtxt"
            )
        binaries = prepare()
        self.ports: Ports = choose_ports(
            options.host, options.http_port, options.grpc_port, options.metrics_port
        )
        self.runtime_dir = Path(tempfile.mkdtemp(prefix="glmserve-"))
        self._shm_prefix = f"glmserve-{os.getpid()}-{secrets.token_hex(4)}-"
        self._ready = False
        self._family: list[Process] = []  # what the server has started, as last seen
        settings = {**options.settings, env.RUNTIME_DIR.name: str(self.runtime_dir)}
        command = [str(binaries.executable), *_arguments(options, self.ports, self._shm_prefix)]
        command.append(f"--backend-directory={binaries.backends}")
        try:
            self._child: Child = spawn(
                command,
                name="server",
                env=binaries.environment(env.child_environment(settings)),
                sink=_print_line,
            )
        except BaseException:
            shutil.rmtree(self.runtime_dir, ignore_errors=True)
            raise

    def __enter__(self) -> EmbeddedServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._child.pid

    def alive(self) -> bool:
        return self._child.alive()

    def status(self) -> dict[str, Any]:
        """What glm_dsa says about itself; empty while it does not answer."""
        relay = RelayClient(self.runtime_dir)
        try:
            return relay.ask(op="status") or {}
        finally:
            relay.close()

    def wait_ready(
        self,
        on_progress: Callable[[str], None] = lambda _line: None,
        give_up: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Waits until the ensemble is ready, which means that every rank has loaded.

        Returns False when `give_up` said so; raises ServerFailed when the server ended.
        """
        shown = ""
        while not give_up():
            if not self.alive():
                raise ServerFailed(self.describe_end())
            if self._is_ready():
                self._ready = True
                self._family = descendants(self._child.pid)
                return True
            line = self.status().get("progress") or "starting the server"
            if line != shown:
                shown = line
                on_progress(line)
            time.sleep(0.1)
        return False

    def describe_end(self) -> str:
        """Why the server ended, from whoever knew best."""
        reason = read_failure(self.runtime_dir)
        return reason or f"tritonserver ended ({self._child.describe_exit()}); see its lines above"

    def stop(self) -> None:
        """Drains, stops the server and whatever it started, removes its shared memory. Under 10 s.

        A server that is still loading has nothing to drain and does not listen: it is killed.
        """
        if self.alive():
            self._family = descendants(self._child.pid)
        if self.alive() and self._ready:
            self._drain()
            self._child.signal(signal.SIGTERM)
            self._child.wait(_EXIT_TIMEOUT + 1.5)
        self._child.signal(signal.SIGKILL)
        self._child.wait(2.0)
        end_processes(self._family, grace=1.0)
        for region in Path("/dev/shm").glob(self._shm_prefix + "*"):
            region.unlink(missing_ok=True)
        shutil.rmtree(self.runtime_dir, ignore_errors=True)

    def _drain(self) -> None:
        """Closes admission and waits until every running request has had its last response."""
        relay = RelayClient(self.runtime_dir)
        deadline = time.monotonic() + _DRAIN_WAIT
        status = relay.ask(op="drain")
        while status and status["running"] + status["unsettled"] and time.monotonic() < deadline:
            time.sleep(0.02)
            status = relay.ask(op="status")
        relay.close()
        time.sleep(0.1)  # postprocess hands the last acknowledged responses to the server

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection(self.ports.host, self.ports.http, timeout=2.0)
        try:
            connection.request("GET", "/v2/models/ensemble/ready")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()


def serve(options: ServeOptions) -> int:
    """Serves until SIGTERM or SIGINT and returns 0; 1 when the server ended by itself."""
    stopping = False

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    options = ServeOptions(**{**vars(options), "settings": _with_checkpoint(options.settings)})
    with EmbeddedServer(options) as server:
        try:
            if not server.wait_ready(_say, lambda: stopping):
                return 0
            _announce(server.ports)
            while not stopping:
                if not server.alive():
                    raise ServerFailed(server.describe_end())
                time.sleep(0.1)
        except ServerFailed as error:
            print(f"glmserve: {error}", file=sys.stderr, flush=True)
            return 1
        _say("stopping")
    return 0


def _arguments(options: ServeOptions, ports: Ports, shm_prefix: str) -> list[str]:
    return [
        f"--model-repository={options.model_repository}",
        "--model-control-mode=explicit",
        "--load-model=ensemble",
        "--disable-auto-complete-config",
        f"--http-address={ports.host}",
        f"--http-port={ports.http}",
        f"--grpc-address={ports.host}",
        f"--grpc-port={ports.grpc}",
        f"--metrics-address={ports.host}",
        f"--metrics-port={ports.metrics}",
        f"--allow-gpu-metrics={'true' if cuda_devices() else 'false'}",
        f"--exit-timeout-secs={_EXIT_TIMEOUT}",
        "--log-info=false",
        f"--backend-config=python,shm-region-prefix-name={shm_prefix}",
        "--backend-config=python,stub-timeout-seconds=1800",
    ]


def _with_checkpoint(settings: Mapping[str, str]) -> dict[str, str]:
    """Adds the project's own small checkpoint where no other is asked for."""
    checkpoint = settings.get(env.CHECKPOINT.name) or env.CHECKPOINT.get()
    directory = Path(checkpoint or _PROJECT / "checkpoints" / "tiny").absolute()
    completed = {**settings, env.CHECKPOINT.name: str(directory)}
    if checkpoint:
        return completed
    if not (directory / "config.json").is_file():
        raise ConfigError("checkpoint", str(directory), "is not there: name another")
    device = settings.get(env.DEVICE.name) or default_device()
    if device == "cpu" and not env.PAGES.is_set():
        # Eight fp64 caches of the usual size would fill a laptop: these hold 8,192 tokens each.
        completed.setdefault(env.PAGES.name, "129")
    return completed


def _announce(ports: Ports) -> None:
    messages = json.dumps([{"role": "user", "content": "What is 12 + 30?"}])
    body = json.dumps({"messages": messages, "max_tokens": 128, "temperature": 0})
    print(
        f"ready: http {ports.host}:{ports.http}, grpc {ports.host}:{ports.grpc}, "
        f"metrics {ports.host}:{ports.metrics}\n"
        f"  curl -s http://{ports.host}:{ports.http}/v2/models/ensemble/generate -d '{body}'",
        flush=True,
    )


def _say(line: str) -> None:
    print(f"glmserve: {line}", file=sys.stderr, flush=True)


def _print_line(line: str) -> None:
    if not _HARMLESS.search(line.removeprefix("[server] ")):
        sys.stderr.write(line)
        sys.stderr.flush()
