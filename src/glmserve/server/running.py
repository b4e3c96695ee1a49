# SPDX-License-Identifier: Apache-2.0
"""A request of glm_dsa between its submission and its last response; owned by the sender thread.

Collects what the engine makes until it can be sent. When that is, `glm_stage` decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from glmserve.errors import GlmServeError
from glmserve.messages import Chunk, TokenLogprobs
from glmserve.server.logprobs import encode_logprobs
from glmserve.server.observations import Times
from glmserve.server.stage_messages import TokensRequest, TokensResponse


class Responder(Protocol):
    """The server's end of one request; only the sender thread calls it."""

    def send(self, response: TokensResponse, final: bool) -> None: ...

    def fail(self, error: GlmServeError) -> None:
        """Answers with an error status; nothing may follow."""

    def finish(self) -> None:
        """Ends the request without another response."""

    def is_cancelled(self) -> bool: ...


# Told new ids of one answer, says whether a stop string has been met.
StopWatch = Callable[[Sequence[int]], bool]


@dataclass
class Running:
    """A request whose last response has not been sent; owned by the sender thread."""

    source: TokensRequest
    responder: Responder
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
        return self.source.request.uid

    @property
    def acknowledges(self) -> bool:
        return self.source.output_settings is not None

    @property
    def in_flight(self) -> bool:
        return self.acknowledges and self.acked < self.index - 1

    def take_response(self) -> TokensResponse:
        """Everything that has not been sent, as the next response; that is then sent."""
        last = self.last
        response = TokensResponse(
            output_ids=np.array(self.pending, dtype=np.int32),
            finish_reason=(last.finish_reason or "") if last else "",
            stop_token=-1 if last is None or last.stop_token is None else last.stop_token,
            num_input_tokens=len(self.source.request.prompt),
            num_cached_tokens=self.cached,
            num_output_tokens=len(self.pending),
            request_uid=self.uid,
            index=self.index,
            error_message=last.error if last else "",
            output_settings=self.source.output_settings if self.index == 0 else None,
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
        if self.source.request.sampling.logprobs is None:
            return None
        entries, self.logprobs = self.logprobs, []
        return encode_logprobs(self.pending, entries)

    def _take_prompt_logprobs(self) -> str | None:
        entries, self.prompt_logprobs = self.prompt_logprobs, []
        if not entries:
            return None
        return encode_logprobs(self.source.request.prompt[1 : 1 + len(entries)].tolist(), entries)
