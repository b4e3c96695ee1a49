# SPDX-License-Identifier: Apache-2.0
"""Sends results to the engine when the device has them, while the rank goes on with other plans."""

from __future__ import annotations

import os
import queue
import threading
import traceback

from glmserve.ipc.errors import Aborted
from glmserve.ipc.ring import BroadcastRing
from glmserve.messages import encode
from glmserve.runtime.results import Pending


class ResultSender:
    """Rank 0's way out. With `threaded` (CUDA) a thread waits for the device and sends."""

    def __init__(self, ring: BroadcastRing, threaded: bool) -> None:
        self._ring = ring
        self._queue: queue.SimpleQueue[Pending] | None = None
        if threaded:
            self._queue = queue.SimpleQueue()
            threading.Thread(target=self._run, name="results", daemon=True).start()

    def put(self, pending: Pending) -> None:
        """Sends the step's result now (CPU: it is there) or as soon as it is there, in order."""
        if self._queue is None:
            self._ring.send(encode(pending.wait()))
        else:
            self._queue.put(pending)

    def _run(self) -> None:
        assert self._queue is not None
        try:
            while True:
                self._ring.send(encode(self._queue.get().wait()))
        except Aborted:
            return  # the engine is closing; the main thread hears of it too
        except BaseException:
            # The main thread may wait for a plan that never comes: the process ends here, and
            # the launcher tells the engine.
            traceback.print_exc()
            os._exit(1)
