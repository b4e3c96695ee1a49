# SPDX-License-Identifier: Apache-2.0
"""Readiness, signals, and what is left behind. Tokens are scripted."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.server.harness import SCRIPTED, BackgroundStreams, Server, wait_until
from tests.server.scripted_engine import LOADING, Act

# Streams that never end by themselves.
LONG = {"text_input": "one two", "stream": True, "max_tokens": 1500, "seed": Act.HOLD}


def _server(checkpoint: Path, wait: bool = True, loading: Path = Path("/nowhere")) -> Server:
    """The script loads for as long as the file `loading` is there."""
    settings = {"GLMSERVE_ENGINE": SCRIPTED, LOADING: str(loading)}
    return Server("--checkpoint", str(checkpoint), wait=wait, **settings)


def test_sigterm_with_sixteen_streams_and_after_failed_requests(checkpoint: Path) -> None:
    with _server(checkpoint) as server:
        for _ in range(3):
            assert server.generate(text_input="x", top_p=0.0)[0] == 400
            assert server.generate(text_input="x", max_tokens=9, seed=Act.FAIL_AT_ONCE)[0] == 400
        streams = BackgroundStreams(server, [LONG] * 16)
        wait_until(lambda: server.status()["running"] == 16, 20.0, "sixteen streams run")
        seconds = server.stop(signal.SIGTERM)
        assert seconds < 10.0
        for got in streams.join(60.0):
            assert (got.finish_reason, got.finals, got.error) == ("abort", 1, "")


def test_ready_only_when_the_engine_is_and_sigint_when_idle(
    checkpoint: Path, tmp_path: Path
) -> None:
    """While the script loads the ensemble is not ready and says so."""
    loading = tmp_path / "loading"
    loading.touch()
    with _server(checkpoint, wait=False, loading=loading) as server:
        wait_until(lambda: "loading the script" in server.log_text, 60.0, "the progress line")
        time.sleep(0.5)  # several looks at readiness
        assert "ready:" not in server.log_text
        loading.unlink()
        server.wait_ready()
        assert server.ready()
        assert server.status()["state"] == "ready"
        assert server.generate(text_input="x", max_tokens=3)[0] == 200
        assert server.stop(signal.SIGINT) < 10.0


def test_sigterm_while_loading(checkpoint: Path, tmp_path: Path) -> None:
    loading = tmp_path / "loading"
    loading.touch()
    with _server(checkpoint, wait=False, loading=loading) as server:
        wait_until(lambda: "loading the script" in server.log_text, 60.0, "the progress line")
        assert server.stop() < 10.0


def test_a_draining_server_refuses_new_requests_and_ends_the_running(checkpoint: Path) -> None:
    with _server(checkpoint) as server:
        streams = BackgroundStreams(server, [LONG] * 2)
        wait_until(lambda: server.status()["running"] == 2, 20.0, "two streams run")
        relay = server.relay()
        assert relay.ask(op="drain") is not None
        relay.close()
        assert [got.finish_reason for got in streams.join(60.0)] == ["abort", "abort"]
        status, body = server.generate(text_input="x", max_tokens=3)
        assert (status, "shutting down" in body["error"]) == (400, True)
        assert server.stop() < 10.0


def test_a_dead_engine_ends_running_requests_and_the_server(checkpoint: Path) -> None:
    with _server(checkpoint) as server:
        streams = BackgroundStreams(server, [LONG, LONG])
        wait_until(lambda: server.status()["running"] == 2, 20.0, "two streams run")
        dying = server.grpc_stream(text_input="x", stream=True, max_tokens=50, seed=Act.DIE)
        for got in [dying, *streams.join(60.0)]:
            assert (got.finish_reason, got.finals) == ("error", 1)
            assert got.responses[-1]["error_message"] == "the engine failed"
        assert server.process.wait(timeout=60.0) == 1
        assert "rank 0 died (signal 9)" in server.log_text
        server.check_nothing_left()


def test_a_killed_tritonserver_ends_the_command_with_its_reason(checkpoint: Path) -> None:
    with _server(checkpoint) as server:
        os.kill(server.tritonserver_pid(), signal.SIGKILL)
        assert server.process.wait(timeout=60.0) == 1
        assert "signal 9" in server.log_text
        server.check_nothing_left()


def test_a_killed_command_takes_every_process_with_it(checkpoint: Path) -> None:
    with _server(checkpoint) as server:
        runtime_dir = server.runtime_dir()
        server.process.kill()
        server.process.wait(timeout=20.0)
        wait_until(lambda: not any(p.alive() for p in server.family), 20.0, "nothing survives")
    # Nobody is left to remove these.
    for region in Path("/dev/shm").glob(f"glmserve-{server.process.pid}-*"):
        region.unlink()
    shutil.rmtree(runtime_dir)


def test_a_busy_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "glmserve.cli", "serve", "--http-port", port]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f"http port {port}" in done.stderr
    assert "--http-port" in done.stderr


def test_a_setting_of_the_environment_reaches_the_stages(checkpoint: Path) -> None:
    """Stop strings that count in the content only do not end a reasoning."""
    request = {"messages": '[{"role": "user", "content": "alpha END"}]', "max_tokens": 60}
    with Server(
        "--checkpoint", str(checkpoint), GLMSERVE_ENGINE=SCRIPTED, GLMSERVE_STOP_SCOPE="content"
    ) as server:
        _, body = server.generate(**request, stop_words=["END"])
        assert body["finish_reason"] == "length"
        assert "END" in body["reasoning_content"]


def test_a_setting_that_cannot_be_is_named(checkpoint: Path) -> None:
    with Server(
        "--checkpoint",
        str(checkpoint),
        wait=False,
        GLMSERVE_ENGINE=SCRIPTED,
        GLMSERVE_STOP_SCOPE="everywhere",
    ) as server:
        assert server.process.wait(timeout=60.0) == 1
        assert "GLMSERVE_STOP_SCOPE = 'everywhere': expected one of raw, content" in server.log_text
