# SPDX-License-Identifier: Apache-2.0
"""Splits a GLM answer into reasoning, content and tool calls, one token after the other.

Markers arrive as markers (one id each) and everything else as text, so text that merely spells a
marker never steers. A `<tool_call>` opens a call only once a well-formed name and a tag have
followed; until then its text waits. What is inside a call is `call_body`'s business, stop strings
and white space are `assembly`'s.
"""

from __future__ import annotations

import re
from enum import IntEnum

from glmserve.text import markers
from glmserve.text.assembly import Assembly, Channel
from glmserve.text.call_body import CallBody, Progress
from glmserve.text.output_options import OutputOptions
from glmserve.text.tool_schema import ToolSet

_NAME = re.compile(r"\s*([A-Za-z0-9_.:/-]{1,128})(?:\s|\\n)*")
_NAME_SO_FAR = re.compile(r"\s*(?:[A-Za-z0-9_.:/-]{1,128}(?:\s|\\n)*\\?)?")
_NAME_BEGUN = re.compile(r"[\r\n]*[A-Za-z0-9_.:/-]")
_LONGEST_OPENING = 1024  # characters after <tool_call> until a tag must have come
_CALL_TAGS = frozenset(
    (markers.KEY, markers.KEY_END, markers.VALUE, markers.VALUE_END, markers.CALL_END)
)


class State(IntEnum):
    """What the next token means."""

    REASONING = 0
    CONTENT = 1
    OPENING = 2  # after <tool_call>: a call or text?
    CALL = 3


# Globals are read faster than members, once a token.
_REASONING, _CONTENT = State.REASONING, State.CONTENT
_TO_REASONING, _TO_CONTENT = Channel.REASONING, Channel.CONTENT


class OutputParser:
    """State machine of one answer; writes into an Assembly."""

    __slots__ = (
        "_body",
        "_channel",
        "_leading",
        "_opening",
        "_opening_size",
        "_options",
        "_sink",
        "_tools",
        "reasoning_tokens",
        "state",
    )

    def __init__(self, options: OutputOptions, sink: Assembly) -> None:
        """`options.start` must not be "off"."""
        assert options.start != "off"
        self._options = options
        self._sink = sink
        self._tools = ToolSet(options.tools) if options.tools else None
        # "auto" is content whose leading white space vanishes: a <think> opens reasoning anyway.
        self.state = State.REASONING if options.start == "reasoning" else State.CONTENT
        self._leading = options.start == "reasoning" or not options.mid_text
        self._channel = Channel.CONTENT  # of an opening that turns out to be text
        self._opening: list[tuple[str, int]] = []  # (text, token number)
        self._opening_size = 0
        self._body: CallBody | None = None
        # The caller adds one for each token that arrives in state REASONING; tags are settled here.
        self.reasoning_tokens = 0

    def text(self, text: str) -> None:
        """Feed ordinary text."""
        state = self.state
        if state is _REASONING:
            self._sink.piece(_TO_REASONING, text)
        elif state is _CONTENT:
            if self._leading:
                self._leading_content(text)
            else:
                self._sink.piece(_TO_CONTENT, text)
        elif self._body is not None:
            self._body.text(text)
        else:
            self._extend_opening(text)

    def marker(self, literal: str) -> None:
        """Feed one of `markers.OUTPUT_MARKERS`."""
        state = self.state
        if state is State.CALL:
            self._call_marker(literal)
        elif state is State.OPENING:
            self._close_opening(literal)
        elif literal == markers.THINK:
            if state is State.CONTENT:
                self.state = State.REASONING
                self.reasoning_tokens += 1
            self._sink.piece(Channel.MARKUP, literal)
        elif literal == markers.THINK_END:
            if state is State.REASONING:
                self.state = State.CONTENT
                self.reasoning_tokens -= 1
            self._sink.piece(Channel.MARKUP, literal)
        elif literal == markers.CALL and self._tools is not None:
            self._begin_opening()
        else:
            self.text(literal)

    def finish(self, cut: bool) -> None:
        """End of output: a call that has begun is closed, one that ends in its name is forgotten.

        An answer that the model ended itself (not `cut`) may close with a mere mention of
        <tool_call>: without a name right behind it that is text.
        """
        if self._body is not None:
            self._body.finish()
            self._body = None
        elif self._opening and not cut and _NAME_BEGUN.match(self._opening_text()) is None:
            self._release_opening()
        self._opening.clear()

    def _leading_content(self, text: str) -> None:
        """White space before the turn's text, or right after a call, is not shown."""
        shown = text.lstrip()
        self._sink.piece(Channel.MARKUP, text[: len(text) - len(shown)])
        if shown:
            self._leading = False
            self._sink.piece(Channel.CONTENT, shown)

    def _begin_opening(self) -> None:
        if self.state is State.REASONING:
            self._channel = Channel.REASONING
            self.reasoning_tokens -= 1  # counted back in if this turns out to be text
        else:
            self._channel = Channel.CONTENT
        self.state = State.OPENING
        self._opening = [(markers.CALL, self._sink.position)]
        self._opening_size = 0

    def _extend_opening(self, text: str) -> None:
        if not text:
            return
        self._opening.append((text, self._sink.position))
        self._opening_size += len(text)
        if (
            self._opening_size > _LONGEST_OPENING
            or _NAME_SO_FAR.fullmatch(self._opening_text()) is None
        ):
            self._release_opening()

    def _opening_text(self) -> str:
        return "".join(text for text, _ in self._opening[1:])

    def _close_opening(self, literal: str) -> None:
        match = _NAME.fullmatch(self._opening_text())
        if match is None or literal not in _CALL_TAGS:
            self._release_opening()
            self.marker(literal)
            return
        self._opening.clear()
        self._open_call(match.group(1))
        self._call_marker(literal)

    def _release_opening(self) -> None:
        """The held opening is text after all; each piece keeps the token that it came with."""
        held, now = self._opening, self._sink.position
        self._opening = []
        if self._channel is Channel.REASONING:
            self.state = State.REASONING
            self.reasoning_tokens += len({position for _, position in held})
        else:
            self.state = State.CONTENT
        for text, position in held:
            self._sink.position = position
            self.text(text)
        self._sink.position = now

    def _open_call(self, name: str) -> None:
        assert self._tools is not None
        self._sink.call_boundary()
        self._leading = True
        self.state = State.CALL
        parameters = self._tools.parameters(name)
        delivered = (
            self._options.tool_choice != "none"
            and (parameters is not None or self._options.unknown_tool == "forward")
            and (self._options.parallel_tool_calls or not self._sink.calls_delivered)
        )
        if delivered:
            self._sink.open_call(name)
        self._body = CallBody(parameters, self._sink.arguments if delivered else None)

    def _call_marker(self, literal: str) -> None:
        assert self._body is not None
        progress = self._body.marker(literal)
        if progress is Progress.OPEN:
            return
        self._body = None
        self.state = State.CONTENT
        if progress is Progress.NEXT:
            self._begin_opening()
