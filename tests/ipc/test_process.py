# SPDX-License-Identifier: Apache-2.0
"""Children: tied to their parent twice over, their end noticed and explained, ended in order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from glmserve import env
from glmserve.ipc.process import _TRAMPOLINE, Child, Heartbeat, spawn, terminate
from tests.ipc.processes import gone, wait_until

SLEEP = "import time; time.sleep(600)"
DEAF = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
time.sleep(600)
"""
HEARTBEAT = """
import sys, time
from glmserve.ipc.process import watch_heartbeat
watch_heartbeat(int(sys.argv[1]))
print("watching", flush=True)
time.sleep(600)
"""


def start(code: str, *arguments: str, **options: object) -> Child:
    return spawn(
        [sys.executable, "-c", code, *arguments],
        name="test",
        env=env.child_environment(),
        **options,  # type: ignore[arg-type]
    )


def printed(child: Child, line: str) -> Callable[[], bool]:
    return lambda: line in child.tail().splitlines()


def test_a_child_sees_its_arguments_environment_and_descriptors() -> None:
    read_end, write_end = os.pipe()
    code = "import os, sys; os.write(int(sys.argv[1]), os.environ['NCCL_NVLS_ENABLE'].encode())"
    child = start(code, str(write_end), pass_fds=(write_end,))
    os.close(write_end)
    assert os.read(read_end, 10) == b"0"
    assert os.read(read_end, 10) == b""  # no other copy of the write end is left anywhere
    os.close(read_end)
    assert child.wait(20) == 0
    assert child.describe_exit() == "exit code 0"


def test_output_reaches_the_sink_and_the_tail_explains_a_failure() -> None:
    lines: list[str] = []
    child = start(
        "print('loading'); raise SystemExit('no such tensor: lm_head')", sink=lines.append
    )
    assert child.wait(20) == 1
    assert child.tail().splitlines() == ["loading", "no such tensor: lm_head"]
    assert lines == ["[test] loading\n", "[test] no such tensor: lm_head\n"]


def test_death_is_reported_at_once_and_names_the_signal() -> None:
    ended = threading.Event()
    child = start(SLEEP, on_exit=lambda _child: ended.set())
    assert child.alive()
    assert child.wait(0) is None
    child.signal(signal.SIGKILL)
    assert ended.wait(20)
    assert child.describe_exit() == "signal 9"
    child.signal(signal.SIGKILL)  # the pid is free by now: nothing is sent


def test_a_child_outlives_the_thread_that_spawned_it() -> None:
    children: list[Child] = []
    thread = threading.Thread(target=lambda: children.append(start(SLEEP)))
    thread.start()
    thread.join()
    try:
        assert children[0].wait(0.3) is None
    finally:
        terminate(children, grace=0)


def test_closing_the_heartbeat_ends_the_child() -> None:
    heartbeat = Heartbeat()
    child = start(HEARTBEAT, str(heartbeat.child_fd), heartbeat=heartbeat)
    wait_until(printed(child, "watching"), 20, "the child watches")
    begin = time.monotonic()
    terminate([child], grace=60)
    assert time.monotonic() - begin < 30.0
    assert child.describe_exit() == "exit code 0"


def test_terminate_kills_a_child_that_ignores_everything() -> None:
    polite, deaf = start(SLEEP), start(DEAF)
    wait_until(printed(deaf, "deaf"), 20, "the handler is set")
    terminate([polite, deaf], grace=0.1, term_grace=1.0)
    assert polite.describe_exit() == "signal 15"
    assert deaf.describe_exit() == "signal 9"


PARENT = """
import sys
from glmserve import env
from glmserve.ipc.process import Heartbeat, spawn
kind, code = sys.argv[1:]
for _ in range(3):
    heartbeat = Heartbeat() if kind == "both" else None
    arguments = [str(heartbeat.child_fd)] if heartbeat else []
    child = spawn([sys.executable, "-c", code, *arguments], name="c", env=env.child_environment(),
                  heartbeat=heartbeat)
    print(child.pid, flush=True)
print("started", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("kind", ["death signal alone", "both"])
def test_kill_9_of_the_parent_leaves_no_child(kind: str) -> None:
    code = HEARTBEAT if kind == "both" else SLEEP
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, kind, code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    assert parent.stdin is not None
    pids = [int(parent.stdout.readline()) for _ in range(3)]
    assert parent.stdout.readline() == "started\n"
    assert not any(map(gone, pids))
    parent.kill()
    parent.wait()
    wait_until(lambda: all(map(gone, pids)), 20.0, "all children are gone")
    parent.stdin.close()
    parent.stdout.close()


def test_a_program_that_does_not_exist_is_a_failed_start() -> None:
    heartbeat = Heartbeat()
    child = spawn(["/nowhere/program"], name="test", env={}, heartbeat=heartbeat)
    assert child.wait(20) == 1
    assert "FileNotFoundError" in child.tail()


@pytest.mark.parametrize(("parent", "code"), [(os.getpid(), 7), (1, 1)], ids=["ours", "another"])
def test_a_parent_that_died_before_the_death_signal_was_set_is_noticed(
    parent: int, code: int
) -> None:
    program = [sys.executable, "-c", "raise SystemExit(7)"]
    trampoline = [sys.executable, "-I", "-S", "-c", _TRAMPOLINE, str(parent)]
    assert subprocess.run([*trampoline, *program], check=False).returncode == code
