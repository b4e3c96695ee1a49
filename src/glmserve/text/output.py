# SPDX-License-Identifier: Apache-2.0
"""The output stage of one answer: token ids in, append-only deltas out.

Joins detokenizer, parser, stop strings and white space rule. The result does not depend on how
the ids are grouped into pushes. Usage, transport and the engine's cancellation are the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from glmserve.text.assembly import Assembly, Channel, new_call_id
from glmserve.text.byte_vocabulary import Vocabulary
from glmserve.text.detokenizer import Detokenizer
from glmserve.text.output_options import OutputOptions
from glmserve.text.parser import OutputParser, State
from glmserve.text.tokenizer import Ids

_REASONING = State.REASONING  # a global is read faster than a member


class OutputDelta(NamedTuple):
    """What one push made ready; fields that did not change are empty.

    text: content, or all text if parsing is off. tool_calls: OpenAI's delta objects.
    finish_reason, stop_reason: set once, in the last delta. stopped: a stop string matched, the
    engine must be told. accepted: how many of the pushed ids stand; the others lie behind a stop.
    completion_tokens: ids billed so far, the end-of-answer id included.
    """

    text: str = ""
    reasoning_content: str = ""
    tool_calls: tuple[dict[str, Any], ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    stopped: bool = False
    accepted: int = 0
    completion_tokens: int = 0


class OutputProcessor:
    """State of one answer; its memory is the text that waits, not the text that went out."""

    __slots__ = (
        "_detokenizer",
        "_markers",
        "_options",
        "_parser",
        "_sink",
        "_tokens",
        "finish_reason",
    )

    def __init__(
        self,
        vocabulary: Vocabulary,
        options: OutputOptions,
        call_id: Callable[[], str] = new_call_id,
    ) -> None:
        parsing = options.start != "off"
        self._options = options
        self._detokenizer = Detokenizer(vocabulary.entries)
        self._markers = vocabulary.markers
        self._sink = Assembly(options.stop, trim=parsing, call_id=call_id)
        self._parser = OutputParser(options, self._sink) if parsing else None
        self._tokens = 0
        self.finish_reason: str | None = None

    @property
    def completion_tokens(self) -> int:
        """Ids billed so far."""
        return self._tokens

    @property
    def reasoning_tokens(self) -> int:
        """Ids of the reasoning so far, its closing tag not counted."""
        return min(self._parser.reasoning_tokens, self._tokens) if self._parser else 0

    def push(self, ids: Sequence[int] | Ids, finish_reason: str | None = None) -> OutputDelta:
        """Take the next ids; `finish_reason` is the engine's and ends the answer.

        Raises TokenWithoutText for a padding id. After the end every push gives an empty delta.
        """
        if self.finish_reason is not None:
            return OutputDelta(completion_tokens=self._tokens)
        before = self._tokens
        tokens: Sequence[int] = ids.tolist() if isinstance(ids, np.ndarray) else ids
        stop_token = None if finish_reason is None else self._stop_token(tokens, finish_reason)
        sink = self._sink
        if stop_token is None or self._options.stop.include:
            self._feed(tokens)
        else:
            self._feed(tokens[:-1])
            self._tokens += sink.hit is None
        stopped = False
        if sink.hit is None and finish_reason is not None:
            self._text(self._detokenizer.flush())
            if self._parser is not None:
                self._parser.finish(cut=finish_reason != "stop")
            sink.finish()
        if sink.hit is not None:
            # The token that completed the match may lie behind tokens that were held as a call.
            stopped, self._tokens = True, sink.hit.position
            sink.finish()
            finish_reason = "stop"
        content, reasoning, calls = sink.take()
        if finish_reason is None:
            return OutputDelta(
                content,
                reasoning,
                calls,
                None,
                None,
                False,
                len(tokens),
                self._tokens,
            )
        self.finish_reason = self._final_reason(finish_reason)
        return OutputDelta(
            content,
            reasoning,
            calls,
            self.finish_reason,
            sink.hit.string if sink.hit is not None else stop_token,
            stopped,
            max(0, self._tokens - before),
            self._tokens,
        )

    def _feed(self, tokens: Sequence[int]) -> None:
        """The hot loop: one pass over the ids, until a stop string completes."""
        sink, parser, detokenize = self._sink, self._parser, self._detokenizer.push
        markers = self._markers
        position = self._tokens
        for token in tokens:
            position += 1
            sink.position = position
            literal = markers.get(token)
            if literal is not None:
                self._text(self._detokenizer.flush())
            if parser is None:
                sink.piece(Channel.CONTENT, detokenize(token))
            else:
                if parser.state is _REASONING:
                    parser.reasoning_tokens += 1
                if literal is None:
                    parser.text(detokenize(token))
                else:
                    parser.marker(literal)
            if sink.hit is not None:
                break
        self._tokens = position

    def _text(self, text: str) -> None:
        if text and self._parser is not None:
            self._parser.text(text)
        elif text:
            self._sink.piece(Channel.CONTENT, text)

    def _stop_token(self, tokens: Sequence[int], finish_reason: str | None) -> int | None:
        """The request's own stop token that ended the answer, if one did."""
        own = self._options.stop.token_ids
        if finish_reason == "stop" and len(tokens) and tokens[-1] in own:
            return int(tokens[-1])
        return None

    def _final_reason(self, engine: str) -> str:
        named = self._options.tool_choice.startswith("named:")
        if engine == "stop" and self._sink.calls_delivered and not named:
            return "tool_calls"
        return engine
