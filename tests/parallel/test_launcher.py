# SPDX-License-Identifier: Apache-2.0
"""RankLauncher: starting, failing, closing; with ranks that do not load torch."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from glmserve import env
from glmserve.config import EngineConfig
from glmserve.errors import ConfigError, EngineError
from glmserve.ipc.errors import MessageTooLarge
from glmserve.parallel.launcher import RankLauncher
from glmserve.parallel.native import library_fd
from tests.ipc.processes import environment_of, gone, wait_until

PROGRAM = str(Path(__file__).with_name("idle_program.py"))


@contextmanager
def launched(role: str, ranks: int = 2, **options: object) -> Iterator[RankLauncher]:
    device = options.pop("device", "cpu")
    collectives = options.pop("collectives", "nccl" if device == "cuda" else "shm")
    config = EngineConfig(
        checkpoint="none",
        ranks=ranks,
        device=device,
        collectives=collectives,  # type: ignore[arg-type]
    )
    launcher = RankLauncher(
        config,
        program=(PROGRAM,),
        extra_env={"GLMSERVE_TEST_ROLE": role},
        **options,  # type: ignore[arg-type]
    )
    try:
        yield launcher
    finally:
        launcher.close(timeout=4)


def test_plans_reach_the_ranks_and_results_come_back() -> None:
    with launched("echo", ranks=4) as launcher:
        assert launcher.recv(20) == b"ready"
        for size in (1, 100_000):
            plan = os.urandom(size)
            launcher.send(plan, 10)
            assert launcher.recv(20) == plan
        launcher.check()
        assert launcher.failure is None
        assert len(set(launcher.pids)) == 4
        wait_until(
            lambda: [child.tail() for child in launcher.children] == ["torch loaded: False"] * 4,
            20,
            "every rank says that it has not loaded torch",
        )


def test_a_plan_that_no_ring_could_hold_is_refused() -> None:
    with launched("echo", ranks=1, plan_bytes=4096) as launcher:
        with pytest.raises(MessageTooLarge):
            launcher.send(bytes(5000))
        launcher.send(b"small")
        assert [launcher.recv(20), launcher.recv(20)] == [b"ready", b"small"]


def test_a_rank_that_cannot_start_is_named_and_its_reason_kept() -> None:
    told = threading.Event()
    reasons: list[str] = []

    def on_failure(reason: str) -> None:
        reasons.append(reason)
        told.set()

    with launched("fail", ranks=4, on_failure=on_failure) as launcher:
        assert told.wait(20)
        with pytest.raises(EngineError, match=r"^rank 3 died \(exit code 1\)$"):
            launcher.recv(20)
        assert reasons == ["rank 3 died (exit code 1)"]
        assert launcher.failure_detail == "tensor lm_head.weight is missing"
        with pytest.raises(EngineError, match="rank 3"):
            launcher.check()
        wait_until(lambda: all(map(gone, launcher.pids)), 20.0, "the other ranks have ended")


def test_close_ends_the_ranks_at_once_and_gives_everything_back() -> None:
    library_fd()  # stays open as long as the process
    gc.collect()  # what earlier tests left is closed now, not while this one counts
    before = set(os.listdir("/proc/self/fd"))
    with launched("echo", ranks=8) as launcher:
        assert launcher.recv(30) == b"ready"
        start = time.monotonic()
        launcher.close(timeout=60.0)
        assert time.monotonic() - start < 30.0  # none of them waited for the time to pass
        assert all(map(gone, launcher.pids))
        assert launcher.failure is None
        launcher.close()
    wait_until(
        lambda: set(os.listdir("/proc/self/fd")) <= before, 20.0, "every descriptor is closed"
    )


def test_close_kills_ranks_that_ignore_it_within_its_timeout() -> None:
    with launched("deaf") as launcher:
        assert launcher.recv(20) == b"ready"
        wait_until(lambda: all(c.tail() for c in launcher.children), 20.0, "all of them are deaf")
        start = time.monotonic()
        launcher.close(timeout=3.0)
        assert time.monotonic() - start < 15.0  # they sleep for ten minutes
        assert {child.describe_exit() for child in launcher.children} == {"signal 9"}


@pytest.mark.parametrize("collectives", ["shm", "gloo"])
def test_nothing_can_turn_multicast_back_on(
    collectives: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    with launched("echo", collectives=collectives) as launcher:
        assert launcher.recv(20) == b"ready"
        for pid in launcher.pids:
            environment = environment_of(pid)
            assert environment["CUDA_VISIBLE_DEVICES"] == ""
            for name, value in env.REQUIRED_CHILD_ENV.items():
                assert environment[name] == value


@pytest.mark.parametrize(("outer", "expected"), [(None, ["0", "1"]), ("5,GPU-7", ["5", "GPU-7"])])
def test_each_rank_sees_one_gpu(
    outer: str | None, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if outer is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", outer)
    with launched("echo", device="cuda") as launcher:
        assert launcher.recv(20) == b"ready"
        environments = [environment_of(pid) for pid in launcher.pids]
        assert [e["CUDA_VISIBLE_DEVICES"] for e in environments] == expected
        # Without it torch's symmetric memory refuses ranks that all call their GPU cuda:0.
        assert {e["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] for e in environments} == {"1"}


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with (
        pytest.raises(ConfigError, match="ranks = 4: only 2 GPUs"),
        launched("echo", ranks=4, device="cuda"),
    ):
        pass


ENGINE = """
import sys
from glmserve.config import EngineConfig
from glmserve.parallel.launcher import RankLauncher
launcher = RankLauncher(EngineConfig(checkpoint="none", ranks=4), program=(sys.argv[1],),
                        extra_env={"GLMSERVE_TEST_ROLE": "echo"})
assert launcher.recv(20) == b"ready"
print(*launcher.pids, flush=True)
launcher.recv()
"""


def test_kill_9_of_the_engine_leaves_no_rank() -> None:
    engine = subprocess.Popen([sys.executable, "-c", ENGINE, PROGRAM], stdout=subprocess.PIPE)
    assert engine.stdout is not None
    pids = [int(word) for word in engine.stdout.readline().split()]
    assert len(pids) == 4
    assert not any(map(gone, pids))
    engine.kill()
    engine.wait()
    wait_until(lambda: all(map(gone, pids)), 20.0, "every rank is gone")
    engine.stdout.close()
