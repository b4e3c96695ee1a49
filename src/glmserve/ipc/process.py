# SPDX-License-Identifier: Apache-2.0
"""Child processes that never outlive their parent, and whose death is noticed at once.

Two independent cords tie a child: PR_SET_PDEATHSIG (the kernel kills it when the parent dies, even
by SIGKILL) and a heartbeat pipe (the child exits when it reads EOF, which is also how a parent asks
it to go). Children are signalled only by recorded pid, and never after they were reaped.
Not its job: what a child runs, or restarting it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

_TAIL_LINES = 40

# Runs in the child before the real program, in a bare interpreter (20 ms): Popen's preexec_fn
# would run Python between fork and exec, where another thread's lock may be held for ever. The
# signal survives execv. A parent that died before prctl is noticed by the changed parent pid.
_TRAMPOLINE = """
import ctypes, os, sys
if ctypes.CDLL(None).prctl(1, 9, 0, 0, 0) != 0 or os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


class Heartbeat:
    """A pipe whose write end this process keeps: closing it, or dying, tells the child to exit."""

    def __init__(self) -> None:
        self.child_fd, self._parent_fd = os.pipe()
        self._closing = threading.Lock()  # a descriptor closed twice may be somebody else's

    def close_child_end(self) -> None:
        """Closes this process's copy of the child's end, once the child has inherited it."""
        with self._closing:
            if self.child_fd >= 0:
                os.close(self.child_fd)
            self.child_fd = -1

    def close(self) -> None:
        """Tells the child to exit."""
        with self._closing:
            if self._parent_fd >= 0:
                os.close(self._parent_fd)
            self._parent_fd = -1


def watch_heartbeat(fd: int) -> None:
    """In a child: starts a thread that ends this process when the parent's end of `fd` closes.

    It exits without clean-up: whoever holds the other end has finished with this process, and the
    main thread may sit in a call that never returns.
    """

    def wait() -> None:
        with contextlib.suppress(OSError):
            while os.read(fd, 1):
                pass
        os._exit(0)

    threading.Thread(target=wait, name="heartbeat", daemon=True).start()


class Child:
    """One started process. All methods may be called from any thread."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        name: str,
        heartbeat: Heartbeat | None,
        on_exit: Callable[[Child], None] | None,
        sink: Callable[[str], None],
    ) -> None:
        self.name = name
        self.pid = process.pid
        self._process = process
        self._heartbeat = heartbeat
        self._on_exit = on_exit
        self._sink = sink
        self._lines: deque[str] = deque(maxlen=_TAIL_LINES)
        self._reaping = threading.Lock()  # held to reap and to signal: no signal to a reused pid
        self._exited = threading.Event()
        self._pump = threading.Thread(target=self._copy_output, name=f"{name}-out", daemon=True)
        self._pump.start()
        threading.Thread(target=self._reap, name=f"{name}-wait", daemon=True).start()

    def alive(self) -> bool:
        """Says whether the process has not been reaped yet."""
        return not self._exited.is_set()

    def wait(self, timeout: float | None = None) -> int | None:
        """Waits for the end; returns the exit code (-N for signal N), None after `timeout` s."""
        return self._process.returncode if self._exited.wait(timeout) else None

    def describe_exit(self) -> str:
        """Returns "signal 9", "exit code 1" or "running"."""
        code = self._process.returncode
        if code is None:
            return "running"
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def tail(self) -> str:
        """Returns the last lines that the process printed, to explain a failed start."""
        if not self.alive():
            self._pump.join(0.5)  # what it printed last is still on its way
        return "\n".join(tuple(self._lines))

    def ask_to_exit(self) -> None:
        """Closes the heartbeat, on which the child exits by itself."""
        if self._heartbeat is not None:
            self._heartbeat.close()

    def signal(self, number: int) -> None:
        """Sends a signal, unless the process is gone."""
        with self._reaping:
            if self._process.returncode is None:
                os.kill(self.pid, number)

    def _reap(self) -> None:
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with self._reaping:
            self._process.wait()
        self._exited.set()
        self.ask_to_exit()  # nobody reads it any more: frees the descriptor
        if self._on_exit is not None:
            self._on_exit(self)

    def _copy_output(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            for raw in stream:
                line = raw.decode(errors="replace").rstrip("\n")
                self._lines.append(line)
                # A closed stderr must not stop the pump: the child would block on a full pipe.
                with contextlib.suppress(OSError, ValueError):
                    self._sink(f"[{self.name}] {line}\n")


def _to_stderr(line: str) -> None:
    sys.stderr.write(line)


class _Forker:
    """The thread that forks every child.

    PDEATHSIG fires when the forking *thread* ends, so that thread has to live as long as the
    process; callers of spawn() may be short-lived.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[
            tuple[Future[subprocess.Popen[bytes]], Callable[[], subprocess.Popen[bytes]]]
        ] = queue.SimpleQueue()
        self.pid = os.getpid()
        threading.Thread(target=self._run, name="forker", daemon=True).start()

    def run(self, job: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
        future: Future[subprocess.Popen[bytes]] = Future()
        self._jobs.put((future, job))
        return future.result()

    def _run(self) -> None:
        while True:
            future, job = self._jobs.get()
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)


def interpreter() -> str:
    """Returns the Python to start children with; inside an embedding host, the one on PATH."""
    return sys.executable or shutil.which("python3") or "python3"


_forker: _Forker | None = None
_forker_lock = threading.Lock()


def spawn(
    argv: Sequence[str],
    *,
    name: str,
    env: Mapping[str, str],
    pass_fds: Sequence[int] = (),
    heartbeat: Heartbeat | None = None,
    on_exit: Callable[[Child], None] | None = None,
    sink: Callable[[str], None] = _to_stderr,
) -> Child:
    """Starts `argv` (argv[0] is an absolute path) tied to this process; raises OSError.

    The child gets its own session, so that a terminal's Ctrl-C reaches only the parent, which
    then stops its children in order; its stdout and stderr reach `sink` line by line as
    "[name] line\\n". `pass_fds` and the heartbeat's `child_fd` keep their numbers.
    `on_exit` is called once, from a thread of its own, right after the child was reaped.
    """
    global _forker
    with _forker_lock:
        if _forker is None or _forker.pid != os.getpid():  # a forked copy has no such thread
            _forker = _Forker()
        forker = _forker
    fds = list(pass_fds)
    if heartbeat is not None:
        fds.append(heartbeat.child_fd)
    trampoline = [interpreter(), "-I", "-S", "-c", _TRAMPOLINE, str(os.getpid())]
    try:
        process = forker.run(
            lambda: subprocess.Popen(
                [*trampoline, *argv],
                env=dict(env),
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        )
    except BaseException:
        if heartbeat is not None:
            heartbeat.close()
        raise
    finally:
        if heartbeat is not None:
            heartbeat.close_child_end()
    return Child(process, name, heartbeat, on_exit, sink)


def terminate(children: Sequence[Child], grace: float = 8.0, term_grace: float = 2.0) -> None:
    """Ends `children`: closes heartbeats, waits `grace` s, SIGTERM, `term_grace` s, SIGKILL.

    Returns when all are reaped (SIGKILL is not refused, only delayed by the kernel).
    """
    for child in children:
        child.ask_to_exit()
    _wait_all(children, grace)
    for number, seconds in ((signal.SIGTERM, term_grace), (signal.SIGKILL, 5.0)):
        remaining = [child for child in children if child.alive()]
        for child in remaining:
            child.signal(number)
        _wait_all(remaining, seconds)


def _wait_all(children: Sequence[Child], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for child in children:
        child.wait(max(0.0, deadline - time.monotonic()))
