# SPDX-License-Identifier: Apache-2.0
"""RankLauncher: starts the rank processes, watches them, and carries plans and results. No torch.

The first rank that dies is the failure of all: it is recorded by name, every wait on shared memory
is aborted and the other ranks' heartbeats close, so nobody waits for it, in whatever call.
Not its job: what a rank does (`glmserve.runtime.rank`), what plans and results mean.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from glmserve import env
from glmserve.config import EngineConfig
from glmserve.errors import ConfigError, EngineError
from glmserve.ipc.errors import Aborted
from glmserve.ipc.process import Child, Heartbeat, interpreter, spawn, terminate
from glmserve.ipc.ring import BroadcastRing
from glmserve.parallel.native import library_fd
from glmserve.parallel.rank_spec import RankSpec
from glmserve.parallel.segment import GroupSegment

RING_BYTES = 8 << 20  # of plans, and of results where no more is asked for
_RANK_PROGRAM = ("-m", "glmserve.runtime.rank")
_COLLECTIVE_TIMEOUT = 600.0  # s; ranks load at different speeds before they first meet
_TERM_GRACE = 1.0  # s between SIGTERM and SIGKILL


class RankLauncher:
    """N rank processes of one engine. send, recv and close belong to one thread."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        program: Sequence[str] = _RANK_PROGRAM,
        plan_bytes: int = RING_BYTES,
        result_bytes: int = RING_BYTES,
        extra_env: Mapping[str, str] | None = None,
        on_failure: Callable[[str], None] | None = None,
        collective_timeout: float = _COLLECTIVE_TIMEOUT,
    ) -> None:
        """Starts the processes and returns at once; they report through `recv`.

        `plan_bytes` and `result_bytes` bound one message. `on_failure` gets the failure's text,
        from another thread. Raises ConfigError (too few GPUs) or OSError.
        """
        self._lock = threading.Lock()
        self._on_failure = on_failure
        self._ending = False  # from now on an exit is no failure
        self._closed = False
        self._failure: tuple[str, Child] | None = None
        self.children: list[Child] = []

        size = config.ranks
        environments = [self._environment(config, rank, extra_env) for rank in range(size)]
        self._plans = BroadcastRing.create(size, plan_bytes, "plans")
        self._results = BroadcastRing.create(1, result_bytes, "results", reader=0)
        shared = config.collectives == "shm"
        self._segment = GroupSegment.create(size) if shared else None
        self._library_fd = library_fd() if shared else -1
        # A socket that already listens: no port can be taken between choosing and using it, and
        # nothing listens on an outside address.
        self._listener = None if shared else socket.create_server(("127.0.0.1", 0))
        try:
            for rank in range(size):
                self._start(rank, config, program, environments[rank], collective_timeout)
        except BaseException:
            self.close(timeout=2.0)
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids by rank."""
        return tuple(child.pid for child in self.children)

    @property
    def failure(self) -> str | None:
        """Returns "rank 7 died (signal 9)" once a rank died unasked, naming the first one."""
        if self._failure is None:
            return None
        what, child = self._failure
        return f"{child.name} {what}"

    @property
    def failure_detail(self) -> str:
        """Returns the last lines that the failed rank printed: for logs, not for clients."""
        return "" if self._failure is None else self._failure[1].tail()

    def check(self) -> None:
        """Raises EngineError with `failure`, if there is one."""
        if self.failure is not None:
            raise EngineError(self.failure)

    def send(self, plan: bytes, timeout: float | None = None) -> None:
        """Sends `plan` to every rank; raises TimeoutError (a rank lags), EngineError (one died)."""
        try:
            self._plans.send(plan, timeout)
        except Aborted as error:
            raise EngineError(self.failure or "the ranks are closed") from error

    def recv(self, timeout: float | None = None) -> bytes:
        """Returns rank 0's next result; raises TimeoutError or EngineError as `send` does."""
        try:
            return self._results.recv(timeout)
        except Aborted as error:
            raise EngineError(self.failure or "the ranks are closed") from error

    def close(self, timeout: float = 8.0) -> None:
        """Ends every rank within about `timeout` seconds: heartbeat, SIGTERM, SIGKILL."""
        with self._lock:
            self._ending = True
            if self._closed:
                return
            self._closed = True
        terminate(self.children, max(0.0, timeout - 2 * _TERM_GRACE), _TERM_GRACE)
        self._abort()
        self._plans.close()
        self._results.close()
        if self._segment is not None:
            self._segment.close()
        if self._listener is not None:
            self._listener.close()

    def _start(
        self,
        rank: int,
        config: EngineConfig,
        program: Sequence[str],
        environment: Mapping[str, str],
        collective_timeout: float,
    ) -> None:
        heartbeat = Heartbeat()
        first = rank == 0
        if self._segment is not None:
            group_fd, port = self._segment.fd, 0
        else:
            assert self._listener is not None
            group_fd = self._listener.fileno() if first else -1
            port = self._listener.getsockname()[1]
        spec = RankSpec(
            rank=rank,
            size=config.ranks,
            collectives=config.collectives,
            engine=config.to_json(),
            heartbeat_fd=heartbeat.child_fd,
            plan_fd=self._plans.fd,
            result_fd=self._results.fd if first else -1,
            group_fd=group_fd,
            library_fd=self._library_fd,
            store_port=port,
            timeout_s=collective_timeout,
        )
        fds = (spec.plan_fd, spec.result_fd, spec.group_fd, spec.library_fd)
        child = spawn(
            [interpreter(), *program, spec.to_json()],
            name=f"rank {rank}",
            env=environment,
            pass_fds=[fd for fd in fds if fd >= 0],
            heartbeat=heartbeat,
            on_exit=self._rank_exited,
        )
        with self._lock:
            self.children.append(child)

    def _rank_exited(self, child: Child) -> None:
        with self._lock:
            if self._ending or self._failure is not None:
                return
            self._failure = (f"died ({child.describe_exit()})", child)
            others = [other for other in self.children if other is not child]
            self._abort()
        for other in others:  # shared memory is aborted; a rank may also sit inside NCCL
            other.ask_to_exit()
        if self._on_failure is not None:
            self._on_failure(f"{child.name} died ({child.describe_exit()})")

    def _abort(self) -> None:
        self._plans.abort()
        self._results.abort()
        if self._segment is not None:
            self._segment.abort()

    @staticmethod
    def _environment(
        config: EngineConfig, rank: int, extra: Mapping[str, str] | None
    ) -> dict[str, str]:
        return env.child_environment(
            {
                # Ranks are on one host: nothing of theirs listens on an outside address.
                "GLOO_SOCKET_IFNAME": "lo",
                "NCCL_SOCKET_IFNAME": "lo",
                # Every rank's only GPU is its cuda:0, which torch's symmetric memory would take
                # for one device used by all (seen with torch 2.11).
                "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
                # Compiled kernels stay beside the prepared server: a second start loads them.
                "TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR")
                or str(Path(env.CACHE_DIR.get() or "~/.cache/glmserve").expanduser() / "triton"),
                **(extra or {}),
                "CUDA_VISIBLE_DEVICES": visible_device(config, rank),
            }
        )


def visible_device(config: EngineConfig, rank: int) -> str:
    """Returns the GPU of `rank`, set before torch is imported: each rank sees one, as cuda:0."""
    if config.device == "cpu":
        return ""
    outer = os.environ.get("CUDA_VISIBLE_DEVICES")
    if outer is None:
        return str(rank)
    devices = [name for name in outer.split(",") if name.strip()]
    if config.ranks > len(devices):
        raise ConfigError("ranks", config.ranks, f"only {len(devices)} GPUs are visible")
    return devices[rank]
