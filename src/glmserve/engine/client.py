# SPDX-License-Identifier: Apache-2.0
"""The client's end of the engine: starts the engine process, submits requests, receives chunks.

Used by the glm_dsa stage of the server and by the offline commands. A reader thread empties the
connection at once, so that a slow consumer never stops the engine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import threading
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Self

from glmserve import env
from glmserve.config import EngineConfig
from glmserve.engine.admission import check_request
from glmserve.engine.chunk_reader import ChunkReader
from glmserve.errors import EngineError
from glmserve.ipc.process import Child, Heartbeat, interpreter, spawn, terminate
from glmserve.messages import (
    Cancel,
    Chunk,
    EngineFailed,
    EngineInfo,
    EngineStats,
    Progress,
    Request,
    Update,
)


@dataclasses.dataclass(frozen=True)
class EngineSpec:
    """What `EngineClient.start` passes to `engine.process` on the command line, as JSON."""

    engine: str  # EngineConfig as JSON
    socket: int  # inherited descriptor of the client connection
    heartbeat: int  # inherited descriptor; end of file = the client has died

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


class EngineClient:
    """One engine and its ranks. `receive` belongs to one thread; the rest may be called by any."""

    info: EngineInfo
    stats: EngineStats | None = None  # the newest; renewed twice a second while steps run

    def __init__(self, child: Child, stream: socket.socket) -> None:
        self._child = child
        self._stream = stream
        self._connection = Connection(os.dup(stream.fileno()))
        self._send_lock = threading.Lock()
        self._arrived = threading.Condition()
        self._chunks: deque[Chunk] = deque()
        self._failure: str | None = None
        self._closing = False
        self._reader: threading.Thread | None = None

    @classmethod
    def start(cls, config: EngineConfig, on_progress: Callable[[str], None] | None = None) -> Self:
        """Starts the engine and its ranks; returns once all have loaded.

        Raises EngineError with the reason when the engine or a rank cannot start.
        """
        ours, theirs = socket.socketpair()
        heartbeat = Heartbeat()
        spec = EngineSpec(config.to_json(), theirs.fileno(), heartbeat.child_fd)
        child = spawn(
            [interpreter(), "-m", "glmserve.engine.process", spec.to_json()],
            name="engine",
            env=env.child_environment(),
            pass_fds=(theirs.fileno(),),
            heartbeat=heartbeat,
        )
        theirs.close()
        client = cls(child, ours)
        try:
            client._wait_ready(on_progress or (lambda _line: None))
        except BaseException:
            client.close()
            raise
        client._reader = threading.Thread(target=client._read, name="engine-reader", daemon=True)
        client._reader.start()
        return client

    def submit(self, request: Request) -> None:
        """Checks and queues a request; raises InvalidInput, or EngineError when the engine died."""
        self._send(check_request(request, self.info))

    def cancel(self, uid: str) -> None:
        """Ends one request with finish_reason "abort"; unknown uids are ignored."""
        self._send(Cancel(uid))

    def cancel_all(self) -> None:
        self._send(Cancel(None))

    def receive(self, timeout: float | None = None) -> list[Chunk]:
        """Returns the chunks that have arrived, waiting up to `timeout` seconds for the first.

        Raises EngineError once the engine has failed and every chunk before that was returned.
        """
        with self._arrived:
            self._arrived.wait_for(
                lambda: self._chunks or self._failure is not None or self._closing, timeout
            )
            chunks = list(self._chunks)
            self._chunks.clear()
            if not chunks and self._failure is not None:
                raise EngineError(self._failure)
            return chunks

    def close(self, timeout: float = 8.0) -> None:
        """Ends the engine and its ranks; returns when their processes are gone."""
        with self._arrived:
            self._closing = True
            self._arrived.notify_all()
        # End of file first: the engine then ends its ranks, reaps them and exits by itself.
        with contextlib.suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)
        if self._reader is not None:  # it has loaded, so it listens
            self._child.wait(timeout)
        terminate([self._child], grace=0.5)
        self._stream.close()
        if self._reader is not None:
            self._reader.join()
        self._connection.close()

    def _send(self, message: Request | Cancel) -> None:
        if self._failure is not None:
            raise EngineError(self._failure)
        try:
            with self._send_lock:
                self._connection.send(message)
        except OSError:
            raise EngineError(self._failure or "the engine has ended") from None

    def _wait_ready(self, on_progress: Callable[[str], None]) -> None:
        try:
            while not isinstance(message := self._connection.recv(), EngineInfo):
                if isinstance(message, EngineFailed):
                    raise EngineError(message.reason)
                assert isinstance(message, Progress), message
                on_progress(message.text)
        except (EOFError, ConnectionError):
            raise EngineError(self._describe_exit()) from None
        self.info = message

    def _read(self) -> None:
        failure = None
        chunks = ChunkReader()
        try:
            while True:
                message = self._connection.recv()
                if isinstance(message, EngineFailed):
                    failure = message.reason
                    break
                if isinstance(message, EngineStats):
                    self.stats = message
                    continue
                assert isinstance(message, Update), message
                made = chunks.read(message)
                with self._arrived:
                    self._chunks.extend(made)
                    self._arrived.notify_all()
        except (EOFError, OSError):
            if not self._closing:
                failure = self._describe_exit()
        except Exception as error:  # whatever it is, nobody may wait for chunks for ever
            failure = f"the connection to the engine broke: {error!r}"
        with self._arrived:
            self._failure = failure or "the engine was closed"
            self._arrived.notify_all()

    def _describe_exit(self) -> str:
        self._child.wait(5.0)
        return f"the engine process ended ({self._child.describe_exit()})\n{self._child.tail()}"
