# SPDX-License-Identifier: Apache-2.0
"""What the glm_dsa model does: requests in, chunks out, through one sender thread.

Threads: the server's execute thread checks and submits; `receiver` takes chunks from the engine;
the relay's thread takes messages; all of them only put events in one queue. The `sender` thread
owns every running request, sends every response and is the only one that polls for cancellation. A
request on its way through postprocess has at most one response in flight: what arrives before the
acknowledgement is merged into the next one, so a busy postprocess gets larger chunks, not more of
them. Not its job: tensors (`model.py`), text (postprocess), scheduling (the engine).
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from glmserve.config import EngineConfig
from glmserve.errors import EngineError, GlmServeError, InvalidInput, Unavailable
from glmserve.messages import Chunk, EngineStats
from glmserve.server.engine_source import StartEngine
from glmserve.server.observations import Observations, Times
from glmserve.server.relay import RelayServer, write_failure
from glmserve.server.running import Responder, Running, StopWatch
from glmserve.server.stage_messages import TokensRequest

_ACK_WAIT: Final = 10.0  # seconds without an acknowledgement until the client counts as gone
_POLL: Final = 0.25  # seconds between two looks at cancellation, keep-alives and lost answers
_EXIT_WAIT: Final = 8.0  # seconds that the server gets to stop after the engine died


@dataclass(frozen=True)
class _Submit:
    source: TokensRequest
    responder: Responder
    arrived: float  # time.monotonic()


@dataclass(frozen=True)
class _Refuse:
    error: GlmServeError
    responder: Responder


@dataclass(frozen=True)
class _Relayed:
    message: Mapping[str, Any]


@dataclass(frozen=True)
class _Failed:
    reason: str


class _Close:
    pass


_Event = _Submit | _Refuse | _Relayed | list[Chunk] | _Failed | _Close


class GlmStage:
    """The engine behind the glm_dsa model. Made once; READY means that every rank has loaded."""

    def __init__(
        self,
        start: StartEngine,
        config: EngineConfig,
        directory: Path,
        keep_alive: float,
        watch_stops: Callable[[str], StopWatch],
    ) -> None:
        """Starts the relay, then the engine; raises EngineError when the engine cannot start.

        `keep_alive`: seconds of silence before a stream gets an empty response, 0 = never.
        `watch_stops` makes a stop watch from a request's output settings.
        """
        self._directory = directory
        self._watch_stops = watch_stops
        self._keep_alive = keep_alive
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._running: dict[str, Running] = {}
        self._delivered: dict[str, float] = {}  # uid -> when to stop waiting for its last ack
        self._draining = False
        self._closing = False
        self._state = "starting"
        self._progress = ""
        self._failure = ""
        self.observations = Observations()
        self._relay = RelayServer(directory, self._on_relay)
        try:
            self._engine = start(config, self._on_progress)
        except Exception as error:
            write_failure(directory, str(error))
            self._relay.close()
            raise
        self._state = "ready"
        self._sender = threading.Thread(target=self._send_loop, name="sender", daemon=True)
        self._receiver = threading.Thread(target=self._receive_loop, name="receiver", daemon=True)
        self._sender.start()
        self._receiver.start()

    def submit(self, source: TokensRequest, responder: Responder) -> None:
        """Queues a request; every answer, also a refusal, comes from the sender thread."""
        self._events.put(_Submit(source, responder, time.monotonic()))

    def refuse(self, error: GlmServeError, responder: Responder) -> None:
        """Answers a request that could not be parsed, in its turn."""
        self._events.put(_Refuse(error, responder))

    def engine_stats(self) -> EngineStats | None:
        """The engine's newest report about itself."""
        return self._engine.stats

    def close(self) -> None:
        """Ends the engine, then the threads, then the relay. Called by the server's finalize."""
        self._closing = True
        self._engine.close()
        self._events.put(_Close())
        self._sender.join(timeout=2.0)
        self._receiver.join(timeout=2.0)
        self._relay.close()

    # -- other threads: they only read settled values and put events ----------------------------

    def _on_progress(self, line: str) -> None:
        self._progress = line

    def _on_relay(self, message: Mapping[str, Any]) -> Mapping[str, Any] | None:
        op = message.get("op")
        if op == "status":
            return self._status()
        if op == "drain":
            self._draining = True
            self._events.put(_Relayed(message))
            return self._status()
        if op in ("ack", "stop", "cancel"):
            self._events.put(_Relayed(message))
            return None
        return {"error": "unknown op"}

    def _status(self) -> dict[str, Any]:
        return {
            "state": "draining" if self._draining else self._state,
            "progress": self._progress,
            "failure": self._failure,
            "running": len(self._running),
            "unsettled": len(self._delivered) + self._events.qsize(),  # events, last answers
        }

    def _receive_loop(self) -> None:
        while not self._closing:
            try:
                chunks = self._engine.receive(timeout=0.5)
            except EngineError as error:
                if not self._closing:
                    self._events.put(_Failed(str(error)))
                return
            if chunks:
                self._events.put(chunks)

    # -- the sender thread ----------------------------------------------------------------------

    def _send_loop(self) -> None:
        try:
            next_poll = time.monotonic() + _POLL
            while True:
                touched: set[str] = set()
                event = self._next_event(next_poll)
                while event is not None:
                    if isinstance(event, _Close):
                        return
                    touched |= self._handle(event)
                    event = self._next_event(0.0)
                if time.monotonic() >= next_poll:
                    touched |= self._poll()
                    next_poll = time.monotonic() + _POLL
                for uid in touched:
                    self._flush(uid)
        except Exception as error:  # a sender that is gone would hang every client
            self._fail_all(f"the sender thread failed: {error!r}")
            self._end_server()

    def _next_event(self, deadline: float) -> _Event | None:
        wait = deadline - time.monotonic()
        with contextlib.suppress(queue.Empty):
            return self._events.get(timeout=wait) if wait > 0 else self._events.get_nowait()
        return None

    def _handle(self, event: _Submit | _Refuse | _Relayed | list[Chunk] | _Failed) -> set[str]:
        """Applies one event; returns the uids that may have something to send."""
        if isinstance(event, list):
            return self._on_chunks(event)
        if isinstance(event, _Relayed):
            return self._on_message(event.message)
        if isinstance(event, _Submit):
            self._on_submit(event)
        elif isinstance(event, _Refuse):
            with _reporting("without a uid"):
                event.responder.fail(event.error)
        else:
            self._fail_all(event.reason)
            self._end_server()
        return set()

    def _on_submit(self, event: _Submit) -> None:
        request = event.source.request
        try:
            if self._failure:
                raise EngineError("the engine has failed")
            if self._draining:
                raise Unavailable("the server is shutting down")
            if request.uid in self._running:
                raise InvalidInput("request_uid", request.uid, "a request with it is running")
            self._engine.submit(request)
        except GlmServeError as error:
            self.observations.finished["refused"] += 1
            with _reporting(request.uid):
                event.responder.fail(error)
            return
        times = Times(event.arrived)
        running = Running(event.source, event.responder, times, sent_at=time.monotonic())
        settings = event.source.output_settings
        if request.sampling.stop and settings is not None and not event.source.stream:
            running.stop_watch = self._watch_stops(settings)
        self._running[request.uid] = running

    def _on_chunks(self, chunks: list[Chunk]) -> set[str]:
        touched, now = set(), time.monotonic()
        for chunk in chunks:
            running = self._running.get(chunk.uid)
            if running is None or running.last is not None:  # ended by a stop string or its client
                continue
            if chunk.token_ids:
                self.observations.tokens(running.times, len(chunk.token_ids), chunk.queued, now)
            running.pending.extend(chunk.token_ids)
            running.logprobs.extend(chunk.logprobs)
            running.prompt_logprobs.extend(chunk.prompt_logprobs)
            running.cached = chunk.num_cached_tokens
            if chunk.finish_reason is not None:
                running.last = chunk
            elif running.stop_watch is not None and running.stop_watch(chunk.token_ids):
                self._cancel_in_engine(chunk.uid)
                running.last = chunk._replace(finish_reason="stop")
            touched.add(chunk.uid)
        return touched

    def _on_message(self, message: Mapping[str, Any]) -> set[str]:
        op, uid, index = message.get("op"), message.get("uid"), message.get("index", -1)
        if op == "drain":
            self._engine.cancel_all()
            return set()
        if not isinstance(uid, str) or not isinstance(index, int):
            return set()
        running = self._running.get(uid)
        if op in ("ack", "stop"):
            self._delivered.pop(uid, None)
        if running is None:
            return set()
        if op == "ack":
            running.acked = max(running.acked, index)
            return {uid}
        self._cancel_in_engine(uid)
        if op == "stop":  # postprocess has already sent the last data response
            self._forget(running, "stop")
            with _reporting(uid):
                running.responder.finish()
        return set()

    def _poll(self) -> set[str]:
        now = time.monotonic()
        for uid, deadline in list(self._delivered.items()):
            if now > deadline:
                del self._delivered[uid]
        touched = set()
        for uid, running in self._running.items():
            gone = running.in_flight and now - running.sent_at > _ACK_WAIT
            with _reporting(uid):
                gone = gone or running.responder.is_cancelled()
            if gone:
                running.acked = running.index  # nothing to wait for any more
                self._cancel_in_engine(uid)
                touched.add(uid)
            elif self._keep_alive and running.source.stream:
                if now - running.sent_at > self._keep_alive:
                    running.keep_alive_due = True
                    touched.add(uid)
        return touched

    def _cancel_in_engine(self, uid: str) -> None:
        with contextlib.suppress(EngineError):  # the receiver reports it
            self._engine.cancel(uid)

    def _flush(self, uid: str) -> None:
        """Sends what `uid` has, unless its previous response is still on its way."""
        running = self._running.get(uid)
        if running is None or running.in_flight:
            return
        last = running.last
        if not running.source.stream and last is None:
            return
        if not (running.pending or last or running.keep_alive_due):
            return
        if last is not None and last.finish_reason == "error" and running.index == 0:
            if not running.pending and not self._failure:
                self._forget(running, "refused" if last.error_code == "UNAVAILABLE" else "error")
                with _reporting(uid):
                    running.responder.fail(_as_error(last))
                return
        self._send(running)

    def _send(self, running: Running) -> None:
        last, response = running.last, running.take_response()
        if last is not None:
            self._forget(running, last.finish_reason or "")
            if running.acknowledges:
                self._delivered[running.uid] = running.sent_at + _ACK_WAIT
        try:
            running.responder.send(response, final=last is not None)
        except Exception as error:  # the server refused it: nobody waits for the rest
            _report(running.uid, error)
            if self._running.pop(running.uid, None) is not None:
                self._cancel_in_engine(running.uid)

    def _forget(self, running: Running, reason: str) -> None:
        """The last response of a request is on its way, or nobody waits for it."""
        del self._running[running.uid]
        prompt = running.source.request.prompt
        self.observations.ended(running.times, len(prompt), reason, time.monotonic())

    def _fail_all(self, reason: str) -> None:
        """Ends every running request with an error that travels as data."""
        self._failure = reason
        write_failure(self._directory, reason)
        for uid, running in list(self._running.items()):
            if running.last is None:
                running.last = Chunk(
                    uid, 0, finish_reason="error", error="the engine failed", error_code="INTERNAL"
                )
            with _reporting(uid):
                self._send(running)
        self._running.clear()

    def _end_server(self) -> None:
        """Stops the server that this stub belongs to: only the end of the process takes its
        readiness away. The stub itself goes a bounded time later, whatever the server does."""
        print(f"glm_dsa: {self._failure}", flush=True)
        parent = os.getppid()

        def end() -> None:
            time.sleep(0.5)  # the last responses are on their way through postprocess
            os.kill(parent, signal.SIGTERM)
            time.sleep(_EXIT_WAIT)
            self._relay.close()
            os._exit(1)

        threading.Thread(target=end, name="end-server", daemon=True).start()


def _as_error(chunk: Chunk) -> GlmServeError:
    if chunk.error_code == Unavailable.code:
        return Unavailable(chunk.error)
    return GlmServeError(chunk.error)


def _report(uid: str, error: BaseException) -> None:
    print(f"glm_dsa: request {uid}: {error!r}", flush=True)


@contextlib.contextmanager
def _reporting(uid: str) -> Iterator[None]:
    """A request that the server no longer knows must not end the sender thread."""
    try:
        yield
    except Exception as error:
        _report(uid, error)
