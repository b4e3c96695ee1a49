# SPDX-License-Identifier: Apache-2.0
"""What the postprocess model does: tokens of many requests become text, one response each.

State is kept by request_uid and choice, and swept by age, because a request whose client left may
never show its last response. Through the relay it acknowledges every response, stops a request at
a stop string and passes on that a client has gone. Not its job: how ids become text
(`text.output`), tensors.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from glmserve.server.logprobs import LogprobFormat
from glmserve.server.output_settings import OutputSettings
from glmserve.server.relay import RelayClient
from glmserve.server.stage_messages import TextResponse, TokensResponse
from glmserve.text.output import OutputDelta, OutputProcessor
from glmserve.text.tokenizer import Tokenizer

_FORGET_AFTER: Final = 3600.0  # seconds without a response until a request's state is dropped
_SWEEP_EVERY: Final = 60.0
_CANCEL_POLL: Final = 0.1  # seconds between two questions whether a client is still there


@dataclass
class _Answer:
    """A choice of a request between its first and its last response."""

    processor: OutputProcessor
    echo: str
    seen_at: float
    asked_at: float  # when the client was last known to be there
    billed: int = 0  # tokens counted in earlier responses
    reasoning: int = 0  # reasoning tokens counted in earlier responses
    logprob: float = 0.0  # sum over the tokens of earlier responses


class PostprocessStage:
    """One object for the one instance of the model; `handle` is called from its one thread."""

    def __init__(self, tokenizer: Tokenizer, relay: RelayClient) -> None:
        self._tokenizer = tokenizer
        self._logprobs = LogprobFormat(tokenizer)
        self._relay = relay
        self._answers: dict[tuple[str, int], _Answer] = {}  # by uid and choice
        self._swept_at = time.monotonic()

    def close(self) -> None:
        self._relay.close()

    def handle(self, tokens: TokensResponse, is_cancelled: Callable[[], bool]) -> TextResponse:
        """Never raises for a single request's sake: what goes wrong travels as data."""
        now = time.monotonic()
        self._sweep(now)
        key = uid, choice = tokens.request_uid, tokens.sequence_index
        about = {"uid": uid, "choice": choice, "index": tokens.index}
        try:
            answer = self._answer(tokens, now)
            delta = answer.processor.push(tokens.output_ids, tokens.finish_reason or None)
        except Exception as error:  # the request's own: a broken id, lost state
            self._answers.pop(key, None)
            self._relay.tell(op="stop", **about, open=len(self._answers))
            return self._response(tokens, None, OutputDelta(), error=f"postprocess: {error}")
        if delta.finish_reason is not None:
            del self._answers[key]
        elif now - answer.asked_at > _CANCEL_POLL:
            answer.asked_at = now
            if is_cancelled():
                self._relay.tell(op="cancel", uid=uid)
        op = "stop" if delta.stopped else "ack"
        self._relay.tell(op=op, **about, open=len(self._answers))
        return self._response(tokens, answer, delta)

    def _answer(self, tokens: TokensResponse, now: float) -> _Answer:
        key = tokens.request_uid, tokens.sequence_index
        if tokens.output_settings is not None:
            settings = OutputSettings.from_json(tokens.output_settings)
            processor = OutputProcessor(self._tokenizer, settings.options)
            self._answers[key] = _Answer(processor, settings.echo, now, now)
        answer = self._answers.get(key)
        if answer is None:
            raise LookupError("the state of this request was dropped")
        answer.seen_at = now
        return answer

    def _response(
        self, tokens: TokensResponse, answer: _Answer | None, delta: OutputDelta, error: str = ""
    ) -> TextResponse:
        """The outputs of one response; `answer` is None when its state is lost."""
        echo, billed, reasoning, total, logprobs = "", 0, 0, 0.0, "null"
        if answer is not None:
            echo, answer.echo = answer.echo, ""
            billed = max(0, delta.completion_tokens - answer.billed)
            answer.billed += billed
            reasoning = max(0, answer.processor.reasoning_tokens - answer.reasoning)
            answer.reasoning += reasoning
            if tokens.logprobs is not None:
                logprobs, new = self._logprobs.write(tokens.logprobs, delta.accepted)
                answer.logprob += new
            total = answer.logprob
        prompt_logprobs = "null"
        if tokens.prompt_logprobs is not None:
            prompt_logprobs, _ = self._logprobs.write(tokens.prompt_logprobs)
        return TextResponse(
            text_output=echo + delta.text,
            reasoning_content=delta.reasoning_content,
            tool_calls=json.dumps(delta.tool_calls, ensure_ascii=False),
            finish_reason="error" if error else delta.finish_reason or "",
            stop_reason=json.dumps(delta.stop_reason, ensure_ascii=False),
            cumulative_logprob=total,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            num_input_tokens=tokens.num_input_tokens,
            num_cached_tokens=tokens.num_cached_tokens,
            num_output_tokens=billed,
            num_reasoning_tokens=reasoning,
            request_uid=tokens.request_uid,
            index=tokens.index,
            sequence_index=tokens.sequence_index,
            error_message=error or tokens.error_message,
        )

    def _sweep(self, now: float) -> None:
        if now - self._swept_at < _SWEEP_EVERY:
            return
        self._swept_at = now
        for key, answer in list(self._answers.items()):
            if now - answer.seen_at > _FORGET_AFTER:
                del self._answers[key]
