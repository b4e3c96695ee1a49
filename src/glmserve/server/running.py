# SPDX-License-Identifier: Apache-2.0
"""A request of glm_dsa between its submission and its last response; owned by the sender thread.

An `Answer` has one `Running` for each of its `n` choices, which are requests of their own to the
engine and share the server's responder. Collects what the engine makes until it can be sent; when
that is, `glm_stage` decides.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from glmserve.errors import GlmServeError
from glmserve.messages import Chunk, Request, TokenLogprobs
from glmserve.sampling_params import SEED_BOUND
from glmserve.server.logprobs import encode_logprobs
from glmserve.server.observations import Times
from glmserve.server.stage_messages import TokensRequest, TokensResponse


class Responder(Protocol):
    """The server's end of one request; only the sender thread calls it."""

    def send(self, choices: Sequence[TokensResponse], final: bool) -> None:
        """One response with what is new of one choice or of several."""

    def fail(self, error: GlmServeError) -> None:
        """Answers with an error status; nothing may follow."""

    def finish(self) -> None:
        """Ends the request without another response."""

    def is_cancelled(self) -> bool: ...


# Told new ids of one answer, says whether a stop string has been met.
StopWatch = Callable[[Sequence[int]], bool]


@dataclass(eq=False)
class Answer:
    """A client's request and what is still open of it."""

    source: TokensRequest
    responder: Responder
    open: list[Running] = field(default_factory=list)  # choices without a last response
    deferred: list[Running] = field(default_factory=list)  # those the engine does not have yet

    @property
    def uid(self) -> str:
        return self.source.request.uid

    @property
    def failed(self) -> bool:
        """Nothing has been sent or made, and every choice has ended with an error."""
        untouched = len(self.open) == self.source.request.sampling.n
        return untouched and all(
            running.index == 0
            and not running.pending
            and running.last is not None
            and running.last.finish_reason == "error"
            for running in self.open
        )


@dataclass(eq=False)
class Running:
    """A choice whose last response has not been sent."""

    answer: Answer
    request: Request  # as the engine gets it: its uid names the choice
    choice: int
    times: Times
    sent_at: float
    pending: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of `pending`, when asked for
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # not sent yet
    last: Chunk | None = None  # the engine's final chunk
    index: int = 0  # of the next response
    acked: int = -1  # newest response that postprocess has handled
    cached: int = 0  # prompt tokens from the prefix cache, as the newest chunk says
    keep_alive_due: bool = False
    stop_watch: StopWatch | None = None  # where postprocess sees nothing before the end

    @property
    def uid(self) -> str:
        return self.request.uid

    @property
    def acknowledges(self) -> bool:
        return self.answer.source.output_settings is not None

    @property
    def in_flight(self) -> bool:
        return self.acknowledges and self.acked < self.index - 1

    def take_response(self) -> TokensResponse:
        """Everything that has not been sent, as the next response; that is then sent."""
        last, settings = self.last, self.answer.source.output_settings
        response = TokensResponse(
            output_ids=np.array(self.pending, dtype=np.int32),
            finish_reason=(last.finish_reason or "") if last else "",
            stop_token=-1 if last is None or last.stop_token is None else last.stop_token,
            num_input_tokens=len(self.request.prompt),
            num_cached_tokens=self.cached,
            num_output_tokens=len(self.pending),
            request_uid=self.answer.uid,
            index=self.index,
            sequence_index=self.choice,
            error_message=last.error if last else "",
            output_settings=settings if self.index == 0 else None,
            logprobs=self._take_logprobs(),
            prompt_logprobs=self._take_prompt_logprobs(),
        )
        self.pending.clear()
        self.keep_alive_due = False
        self.index += 1
        self.sent_at = time.monotonic()
        return response

    def _take_logprobs(self) -> str | None:
        """Of the pending tokens; None when the request did not ask."""
        if self.request.sampling.logprobs is None:
            return None
        entries, self.logprobs = self.logprobs, []
        return encode_logprobs(self.pending, entries)

    def _take_prompt_logprobs(self) -> str | None:
        entries, self.prompt_logprobs = self.prompt_logprobs, []
        if not entries:
            return None
        return encode_logprobs(self.request.prompt[1 : 1 + len(entries)].tolist(), entries)


def stop_response(uid: str, known: bool) -> TokensResponse:
    """The answer to a request that ends `uid`: "abort" if that was running."""
    return TokensResponse(
        output_ids=np.empty(0, dtype=np.int32),
        finish_reason="abort" if known else "",
        stop_token=-1,
        num_input_tokens=0,
        num_cached_tokens=0,
        num_output_tokens=0,
        request_uid=uid,
        index=0,
        sequence_index=0,
        error_message="",
    )


def choice_uid(uid: str, choice: int) -> str:
    """The engine's name of a choice; the first one has the request's own."""
    return f"{uid}/{choice}" if choice else uid


def make_answer(source: TokensRequest, responder: Responder, arrived: float) -> Answer:
    """An answer with its `n` choices, all deferred: choice i has seed + i, or a seed of its own.

    The prompt's log-probabilities are the first choice's, so that others may skip the prompt.
    """
    answer = Answer(source, responder)
    request, now = source.request, time.monotonic()
    for choice in range(request.sampling.n):
        sampling = dataclasses.replace(request.sampling, n=1)
        if choice:
            seed = sampling.seed
            sampling = dataclasses.replace(
                sampling,
                seed=None if seed is None else (seed + choice) % SEED_BOUND,
                prompt_logprobs=None,
            )
        own = dataclasses.replace(request, uid=choice_uid(request.uid, choice), sampling=sampling)
        answer.open.append(Running(answer, own, choice, Times(arrived), sent_at=now))
    answer.deferred = answer.open.copy()
    return answer
