# SPDX-License-Identifier: Apache-2.0
"""The unix socket beside the inference server: what its ensembles cannot carry.

glm_dsa serves it; postprocess acknowledges responses and reports stops and gone clients, the
launcher drains and asks for the status. One JSON object a line: `ack`, `stop` and `cancel` are
one-way, `drain` and `status` are answered with one line. Not its job: what those words do
(`glm_stage.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import stat
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from glmserve import env
from glmserve.errors import Unavailable

Handler = Callable[[Mapping[str, Any]], Mapping[str, Any] | None]

_SOCKET: Final = "relay.sock"
_FAILURE: Final = "failure"
_LINE_LIMIT: Final = 1 << 16  # bytes; our own messages stay far below


def runtime_dir(server_pid: int) -> Path:
    """The private directory of one server: GLMSERVE_RUNTIME_DIR, else named by the server's pid.

    All stubs are children of the same server process, so they derive the same name. The directory
    is made on first use; one that another user could have prepared is refused (Unavailable).
    """
    configured = env.RUNTIME_DIR.get()
    if configured:
        path = Path(configured)
    else:
        path = Path(tempfile.gettempdir()) / f"glmserve-{os.geteuid()}-{server_pid}"
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise Unavailable("the runtime directory must be a directory that only this user can write")
    return path


def write_failure(directory: Path, reason: str) -> None:
    """Leaves the reason of a death for the launcher; the server's own exit code cannot carry it.

    Only in a directory that a launcher has made, and removes.
    """
    if env.RUNTIME_DIR.is_set():
        with contextlib.suppress(OSError):
            (directory / _FAILURE).write_text(reason)


def read_failure(directory: Path) -> str:
    """The reason left by `write_failure`, or an empty string."""
    try:
        return (directory / _FAILURE).read_text()
    except OSError:
        return ""


class RelayServer:
    """Listens in `directory` and calls `handler` for each message, on one thread of its own.

    The handler must not block; what it returns (None: nothing) is the answer line.
    """

    def __init__(self, directory: Path, handler: Handler) -> None:
        self._path = directory / _SOCKET
        self._handler = handler
        self._path.unlink(missing_ok=True)  # left by a server of the same directory that was killed
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._listener.bind(str(self._path))
        self._listener.listen(16)
        self._listener.setblocking(False)
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._buffers: dict[socket.socket, bytearray] = {}
        self._thread = threading.Thread(target=self._serve, name="relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops the thread; removes the socket, and the directory when nothing else is in it."""
        self._wake_writer.close()
        self._thread.join(timeout=5.0)
        self._path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._path.parent.rmdir()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                ready = key.fileobj
                assert isinstance(ready, socket.socket)
                if ready is self._wake_reader:
                    self._shut()
                    return
                if ready is self._listener:
                    self._accept()
                else:
                    self._read(ready)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            self._buffers[connection] = bytearray()
            self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: socket.socket) -> None:
        buffer = self._buffers[connection]
        try:
            data = connection.recv(_LINE_LIMIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        buffer += data
        if not data or len(buffer) > 4 * _LINE_LIMIT:
            self._drop(connection)
            return
        *lines, rest = bytes(buffer).split(b"\n")
        buffer[:] = rest
        for line in lines:
            answer = self._handle(line)
            if answer is not None:
                try:
                    connection.sendall(json.dumps(answer).encode() + b"\n")
                except OSError:  # a peer that left, or that never reads its answers
                    self._drop(connection)
                    return

    def _handle(self, line: bytes) -> Mapping[str, Any] | None:
        try:
            message = json.loads(line)
        except ValueError:
            return {"error": "not a JSON line"}
        if not isinstance(message, dict):
            return {"error": "not a JSON object"}
        return self._handler(message)

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._buffers[connection]
        connection.close()

    def _shut(self) -> None:
        for connection in list(self._buffers):
            self._drop(connection)
        self._listener.close()
        self._wake_reader.close()
        self._selector.close()


class RelayClient:
    """One connection to the relay, opened when needed and again after the server went away."""

    def __init__(self, directory: Path, timeout: float = 1.0) -> None:
        self._path = directory / _SOCKET
        self._timeout = timeout
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()

    def tell(self, **message: Any) -> bool:
        """Sends a one-way message; False when nobody could be told (the caller goes on)."""
        with self._lock:
            return self._send(message)

    def ask(self, **message: Any) -> dict[str, Any] | None:
        """Sends a message and returns its answer; None when there is no server or no answer."""
        with self._lock:
            if not self._send(message) or self._socket is None:
                return None
            answer = bytearray()
            try:
                while not answer.endswith(b"\n"):
                    part = self._socket.recv(_LINE_LIMIT)
                    if not part:
                        raise ConnectionError("relay closed")
                    answer += part
                parsed = json.loads(answer)
            except (OSError, ValueError):
                self._close()
                return None
            return parsed if isinstance(parsed, dict) else None

    def close(self) -> None:
        with self._lock:
            self._close()

    def _send(self, message: Mapping[str, Any]) -> bool:
        line = json.dumps(message).encode() + b"\n"
        for _ in range(2):  # the second try is on a fresh connection
            try:
                if self._socket is None:
                    self._connect()
                assert self._socket is not None
                self._socket.sendall(line)
            except OSError:
                self._close()
            else:
                return True
        return False

    def _connect(self) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        connection.settimeout(self._timeout)
        try:
            connection.connect(str(self._path))
        except OSError:
            connection.close()
            raise
        self._socket = connection

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
