# SPDX-License-Identifier: Apache-2.0
"""Renders chat templates in a child process that may take only so much time and memory.

The sandbox keeps a template away from Python's internals; this keeps an endless or greedy one
from taking the server with it. A child that overruns is killed and the next request gets a new
one. What is rendered is `template`'s business.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from glmserve import env
from glmserve.errors import CheckpointError, InvalidInput
from glmserve.ipc.process import Child, Heartbeat, interpreter, spawn, terminate, watch_heartbeat
from glmserve.text.template import ChatTemplate, TemplateFailure, TemplateSource

DEFAULT_SECONDS = 5.0
DEFAULT_MEMORY = 2**30  # bytes of address space
_START_SECONDS = 60.0  # a cold start on a busy machine; no template runs in it
_HEADER = struct.Struct("<Q")
_MAX_FRAME = 2**30


class RenderWorker:
    """One child at a time; calls from several threads take turns."""

    def __init__(
        self,
        source: TemplateSource,
        seconds: float = DEFAULT_SECONDS,
        memory: int = DEFAULT_MEMORY,
    ) -> None:
        """`seconds` for one rendering, `memory` bytes for the process. Starts the child.

        Raises CheckpointError if the template does not compile within these limits.
        """
        self._source = source
        self._seconds = seconds
        self._memory = memory
        self._lock = threading.Lock()
        self._child: Child | None = None
        self._socket: socket.socket | None = None
        with self._lock:
            self._start()

    def render(self, arguments: Mapping[str, Any]) -> str:
        """`ChatTemplate.render(**arguments)` in the child; the same errors.

        Raises TemplateFailure if the template ran out of time or memory.
        """
        frame = json.dumps(arguments).encode()
        with self._lock:
            if self._socket is None or self._child is None or not self._child.alive():
                self._stop()
                self._start()
            assert self._socket is not None
            try:
                _send(self._socket, frame, self._seconds)
                answer = _receive(self._socket, self._seconds)
            except TimeoutError:
                self._stop()
                raise TemplateFailure(
                    f"the chat template took longer than {self._seconds:g} s"
                ) from None
            except (OSError, EOFError):
                self._stop()
                raise TemplateFailure("the chat template ended its process") from None
        reply: dict[str, Any] = json.loads(answer)
        if "text" in reply:
            return str(reply["text"])
        if reply["error"] == "InvalidInput":
            raise InvalidInput(*reply["arguments"])
        raise TemplateFailure(*reply["arguments"])

    @property
    def pid(self) -> int | None:
        """Process id of the child, None if there is none now."""
        return self._child.pid if self._child is not None else None

    def close(self) -> None:
        """End the child."""
        with self._lock:
            self._stop()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        heartbeat = Heartbeat()
        try:
            self._child = spawn(
                [interpreter(), "-m", __name__, str(theirs.fileno()), str(heartbeat.child_fd)],
                name="render",
                env=env.child_environment({"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}),
                pass_fds=[theirs.fileno()],
                heartbeat=heartbeat,
            )
        finally:
            theirs.close()
        self._socket = ours
        setup = {
            "text": self._source.text,
            "variables": self._source.variables,
            "seconds": self._seconds,
            "memory": self._memory,
        }
        try:
            _send(ours, json.dumps(setup).encode(), _START_SECONDS)
            _receive(ours, _START_SECONDS)  # Python is up
            complaint = _receive(ours, self._seconds).decode()  # the template is compiled
        except (OSError, EOFError) as error:
            tail = self._child.tail()
            self._stop()
            late = isinstance(error, TimeoutError)
            reason = "it takes too long to compile" if late else f"its process ended: {tail}"
            raise CheckpointError(f"the chat template cannot be used: {reason}") from error
        if complaint:
            self._stop()
            raise CheckpointError(complaint)

    def _stop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._child is not None:
            if self._child.alive():
                self._child.signal(signal.SIGKILL)  # it may sit in a loop and holds nothing
            terminate([self._child])
            self._child = None


def _send(connection: socket.socket, frame: bytes, seconds: float) -> None:
    connection.settimeout(seconds)
    connection.sendall(_HEADER.pack(len(frame)))
    connection.sendall(frame)


def _receive(connection: socket.socket, seconds: float | None) -> bytes:
    """One frame; EOFError if the other side has gone, TimeoutError after `seconds` in all."""
    deadline = None if seconds is None else time.monotonic() + seconds
    (size,) = _HEADER.unpack(_read(connection, _HEADER.size, deadline))
    if size > _MAX_FRAME:
        raise EOFError
    return _read(connection, size, deadline)


def _read(connection: socket.socket, size: int, deadline: float | None) -> bytes:
    data = bytearray()
    while len(data) < size:
        remaining = None if deadline is None else deadline - time.monotonic()
        if remaining is not None and remaining <= 0:
            raise TimeoutError
        connection.settimeout(remaining)
        part = connection.recv(min(size - len(data), 2**20))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def _answer(template: ChatTemplate, request: bytes) -> dict[str, Any]:
    try:
        return {"text": template.render(**json.loads(request))}
    except InvalidInput as error:
        return {"error": "InvalidInput", "arguments": [error.field, error.value, error.reason]}
    except TemplateFailure as error:
        return {"error": "TemplateFailure", "arguments": [str(error)]}
    except MemoryError:
        return {"error": "TemplateFailure", "arguments": ["the chat template ran out of memory"]}


def main(fd: int, heartbeat_fd: int) -> None:
    """Serve renderings on socket `fd` until the parent closes it."""
    watch_heartbeat(heartbeat_fd)
    connection = socket.socket(fileno=fd)
    setup = json.loads(_receive(connection, None))
    resource.setrlimit(resource.RLIMIT_AS, (setup["memory"], setup["memory"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The parent's clock stops an overrun first; this one is for when the parent is gone.
    limit = setup["seconds"] * 2 + 1
    _send(connection, b"up", _START_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        template = ChatTemplate(TemplateSource(setup["text"], setup["variables"]))
    except CheckpointError as error:
        _send(connection, str(error).encode(), _START_SECONDS)
        return
    signal.setitimer(signal.ITIMER_REAL, 0)
    _send(connection, b"", _START_SECONDS)
    while True:
        try:
            request = _receive(connection, None)
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_REAL, limit)
        reply = json.dumps(_answer(template, request)).encode()
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(connection, reply, _START_SECONDS)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
