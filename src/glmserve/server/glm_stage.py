# SPDX-License-Identifier: Apache-2.0
"""What the glm_dsa model does: requests in, chunks out, through one sender thread.

Threads: the server's execute thread checks and submits; `receiver` takes chunks from the engine;
the relay's thread takes messages; all of them only put events in one queue. The `sender` thread
owns every running request, sends every response and is the only one that polls for cancellation. A
choice on its way through postprocess has at most one response in flight: what arrives before the
acknowledgement is merged into the next one, so a busy postprocess gets larger chunks, not more of
them. Not its job: tensors (`model.py`), text (postprocess), scheduling (the engine).
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from glmserve.config import PAGE_SIZE, EngineConfig
from glmserve.errors import EngineError, GlmServeError, InvalidInput, Unavailable
from glmserve.messages import Chunk, EngineStats
from glmserve.server.engine_source import StartEngine
from glmserve.server.observations import Observations
from glmserve.server.relay import RelayServer, write_failure
from glmserve.server.running import (
    Answer,
    Responder,
    Running,
    StopWatch,
    choice_uid,
    make_answer,
    stop_response,
)
from glmserve.server.stage_events import (
    CancelRequest,
    Close,
    Event,
    Failed,
    Refuse,
    Relayed,
    Submit,
)
from glmserve.server.stage_failure import as_error, end_server, report, reporting
from glmserve.server.stage_messages import StopRequest, TokensRequest

_ACK_WAIT: Final = 10.0  # seconds without an acknowledgement until the client counts as gone
_POLL: Final = 0.25  # seconds between two looks at cancellation, keep-alives and lost answers

_ABORT: Final = Chunk("", 0, finish_reason="abort")


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
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._answers: dict[str, Answer] = {}
        self._running: dict[str, Running] = {}  # their open choices, by the engine's uid
        self._delivered: dict[str, float] = {}  # uid -> when to stop waiting for its last ack
        self._postprocess = 0  # answers that postprocess keeps state of, as it last said
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
        self._events.put(Submit(source, responder, time.monotonic()))

    def refuse(self, error: GlmServeError, responder: Responder) -> None:
        """Answers a request that could not be parsed, in its turn."""
        self._events.put(Refuse(error, responder))

    def cancel(self, stop: StopRequest, responder: Responder) -> None:
        """Ends another request; the answer's finish_reason is "abort" if it was running."""
        self._events.put(CancelRequest(stop.uid, responder))

    def engine_stats(self) -> EngineStats | None:
        """The engine's newest report about itself."""
        return self._engine.stats

    def close(self) -> None:
        """Ends the engine, then the threads, then the relay. Called by the server's finalize."""
        self._closing = True
        self._engine.close()
        self._events.put(Close())
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
            self._events.put(Relayed(message))
            return self._status()
        if op in ("ack", "stop", "cancel"):
            self._events.put(Relayed(message))
            return None
        return {"error": "unknown op"}

    def _status(self) -> dict[str, Any]:
        return {
            "state": "draining" if self._draining else self._state,
            "progress": self._progress,
            "failure": self._failure,
            "running": len(self._answers),
            "postprocess": self._postprocess,
            "unsettled": len(self._delivered) + self._events.qsize(),  # events, last answers
        }

    def _receive_loop(self) -> None:
        while not self._closing:
            try:
                chunks = self._engine.receive(timeout=0.5)
            except EngineError as error:
                if not self._closing:
                    self._events.put(Failed(str(error)))
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
                    if isinstance(event, Close):
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
            end_server(self._relay, self._failure)

    def _next_event(self, deadline: float) -> Event | None:
        wait = deadline - time.monotonic()
        with contextlib.suppress(queue.Empty):
            return self._events.get(timeout=wait) if wait > 0 else self._events.get_nowait()
        return None

    def _handle(
        self, event: Submit | Refuse | CancelRequest | Relayed | list[Chunk] | Failed
    ) -> set[str]:
        """Applies one event; returns the uids that may have something to send."""
        if isinstance(event, list):
            return self._on_chunks(event)
        if isinstance(event, Relayed):
            return self._on_message(event.message)
        if isinstance(event, Submit):
            self._on_submit(event)
        elif isinstance(event, Refuse):
            with reporting("without a uid"):
                event.responder.fail(event.error)
        elif isinstance(event, CancelRequest):
            with reporting(event.uid):
                known = event.uid in self._answers
                event.responder.send([stop_response(event.uid, known)], final=True)
            return self._cancel_answer(event.uid)
        else:
            self._fail_all(event.reason)
            end_server(self._relay, self._failure)
        return set()

    def _on_submit(self, event: Submit) -> None:
        source, uid = event.source, event.source.request.uid
        answer = make_answer(source, event.responder, event.arrived)
        try:
            if self._failure:
                raise EngineError("the engine has failed")
            if self._draining:
                raise Unavailable("the server is shutting down")
            if uid in self._answers:
                raise InvalidInput("request_uid", uid, "a request with it is running")
            self._engine.submit(answer.deferred[0].request)
        except GlmServeError as error:
            self.observations.finished["refused"] += 1
            with reporting(uid):
                event.responder.fail(error)
            return
        del answer.deferred[0]
        self._answers[uid] = answer
        for running in answer.open:
            self._running[running.uid] = running
            if source.request.sampling.stop and source.output_settings and not source.stream:
                running.stop_watch = self._watch_stops(source.output_settings)
        if len(source.request.prompt) <= PAGE_SIZE:  # no page to wait for
            self._submit_deferred(answer)

    def _submit_deferred(self, answer: Answer) -> None:
        """Submits the other choices, once the first one's prompt pages can be shared."""
        with contextlib.suppress(EngineError):  # the receiver reports it
            for running in answer.deferred:
                self._engine.submit(running.request)
        answer.deferred.clear()

    def _end_deferred(self, answer: Answer, last: Chunk) -> set[str]:
        """Ends the choices that the engine has not seen; returns their uids."""
        ended = {running.uid for running in answer.deferred}
        for running in answer.deferred:
            running.last = last
        answer.deferred.clear()
        return ended

    def _on_chunks(self, chunks: list[Chunk]) -> set[str]:
        touched: set[str] = set()
        now = time.monotonic()
        for chunk in chunks:
            running = self._running.get(chunk.uid)
            if running is None or running.last is not None:  # ended by a stop string or its client
                continue
            if running.answer.deferred and chunk.token_ids:
                self._submit_deferred(running.answer)
            elif chunk.finish_reason is not None:  # without a token: the others end like it
                touched |= self._end_deferred(running.answer, chunk)
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
        self._postprocess = message.get("open", self._postprocess)
        if op == "drain":
            self._engine.cancel_all()
            touched: set[str] = set()
            for answer in self._answers.values():
                touched |= self._end_deferred(answer, _ABORT)
            return touched
        if not isinstance(uid, str) or not isinstance(index, int):
            return set()
        if op == "cancel":
            return self._cancel_answer(uid)
        uid = choice_uid(uid, message.get("choice", 0))
        self._delivered.pop(uid, None)
        running = self._running.get(uid)
        if running is None:
            return set()
        if op == "ack":
            running.acked = max(running.acked, index)
            return {uid}
        # stop: postprocess has already sent the last data response
        self._cancel_in_engine(uid)
        if self._forget(running, "stop"):
            with reporting(uid):
                running.answer.responder.finish()
        return set()

    def _poll(self) -> set[str]:
        now = time.monotonic()
        for uid, deadline in list(self._delivered.items()):
            if now > deadline:
                del self._delivered[uid]
        touched = set()
        for uid, answer in self._answers.items():
            newest = max(running.sent_at for running in answer.open)
            gone = any(r.in_flight and now - r.sent_at > _ACK_WAIT for r in answer.open)
            with reporting(uid):
                gone = gone or answer.responder.is_cancelled()
            if gone:
                for running in answer.open:
                    running.acked = running.index  # nothing to wait for any more
                    touched.add(running.uid)
                touched |= self._cancel_answer(uid)
            elif self._keep_alive and answer.source.stream and now - newest > self._keep_alive:
                answer.open[0].keep_alive_due = True
                touched.add(answer.open[0].uid)
        return touched

    def _cancel_answer(self, uid: str) -> set[str]:
        """Ends every choice of a request, if it is running; returns those that have ended now."""
        answer = self._answers.get(uid)
        if answer is None:
            return set()
        for running in answer.open:
            self._cancel_in_engine(running.uid)  # which ignores those that it does not have
        return self._end_deferred(answer, _ABORT)

    def _cancel_in_engine(self, uid: str) -> None:
        with contextlib.suppress(EngineError):  # the receiver reports it
            self._engine.cancel(uid)

    def _flush(self, uid: str) -> None:
        """Sends what `uid` has, unless its previous response is still on its way."""
        running = self._running.get(uid)
        if running is None or running.in_flight:
            return
        answer, last = running.answer, running.last
        if answer.failed and last is not None and not self._failure:
            for choice in answer.open.copy():
                self._forget(choice, "refused" if last.error_code == "UNAVAILABLE" else "error")
            with reporting(uid):
                answer.responder.fail(as_error(last))
        elif not answer.source.stream:
            if all(choice.last is not None for choice in answer.open):
                self._send(answer, answer.open.copy())
        elif running.pending or last or running.keep_alive_due:
            self._send(answer, [running])

    def _send(self, answer: Answer, choices: list[Running]) -> None:
        """Sends what these choices have, in one response."""
        responses = [running.take_response() for running in choices]
        done = False
        for running in choices:
            if running.last is not None:
                done = self._forget(running, running.last.finish_reason or "")
                if running.acknowledges:
                    self._delivered[running.uid] = running.sent_at + _ACK_WAIT
        try:
            answer.responder.send(responses, final=done)
        except Exception as error:  # the server refused it: nobody waits for the rest
            report(answer.uid, error)
            self._cancel_answer(answer.uid)
            for running in answer.open.copy():
                self._forget(running, "abort")

    def _forget(self, running: Running, reason: str) -> bool:
        """A choice's last response is on its way, or nobody waits for it; True: the answer's."""
        answer = running.answer
        del self._running[running.uid]
        answer.open.remove(running)
        if not answer.open:
            del self._answers[answer.uid]
        prompt = len(running.request.prompt)
        self.observations.ended(running.times, prompt, reason, time.monotonic())
        return not answer.open

    def _fail_all(self, reason: str) -> None:
        """Ends every running request with an error that travels as data."""
        self._failure = reason
        write_failure(self._directory, reason)
        for uid, answer in list(self._answers.items()):
            for running in answer.open:
                running.last = running.last or Chunk(
                    uid, 0, finish_reason="error", error="the engine failed", error_code="INTERNAL"
                )
            parts = [[r] for r in answer.open] if answer.source.stream else [answer.open.copy()]
            for part in parts:
                with reporting(uid):
                    self._send(answer, part)
