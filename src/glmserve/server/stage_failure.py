# SPDX-License-Identifier: Apache-2.0
"""What glm_dsa does when something fails: tell the operator, and end a server that cannot go on."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Final

from glmserve.errors import GlmServeError, Unavailable
from glmserve.messages import Chunk
from glmserve.server.relay import RelayServer

_EXIT_WAIT: Final = 8.0  # seconds that the server gets to stop after the engine died


def end_server(relay: RelayServer, reason: str) -> None:
    """Stops the server that this stub belongs to: only the end of the process takes its
    readiness away. The stub itself goes a bounded time later, whatever the server does."""
    print(f"glm_dsa: {reason}", flush=True)
    parent = os.getppid()

    def end() -> None:
        time.sleep(0.5)  # the last responses are on their way through postprocess
        os.kill(parent, signal.SIGTERM)
        time.sleep(_EXIT_WAIT)
        relay.close()
        os._exit(1)

    threading.Thread(target=end, name="end-server", daemon=True).start()


def as_error(chunk: Chunk) -> GlmServeError:
    """The status of a request that the engine ended with an error before its first token."""
    if chunk.error_code == Unavailable.code:
        return Unavailable(chunk.error)
    return GlmServeError(chunk.error)


def report(uid: str, error: BaseException) -> None:
    """A line in the server's log."""
    print(f"glm_dsa: request {uid}: {error!r}", flush=True)


@contextlib.contextmanager
def reporting(uid: str) -> Iterator[None]:
    """A request that the server no longer knows must not end the sender thread."""
    try:
        yield
    except Exception as error:
        report(uid, error)
