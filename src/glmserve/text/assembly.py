# SPDX-License-Identifier: Apache-2.0
"""Collects the parser's pieces into the fields of one answer: stop strings and white space here.

Pieces pass the stop matcher in the order in which the model wrote them, then the content's
trailing white space is held back: dropped where a call follows or exists, else released at the
end. Nothing that went out is ever taken back.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple

from glmserve.text.output_options import StopOptions
from glmserve.text.stop import StopMatcher


class Channel(IntEnum):
    """Where a piece of the model's text belongs; MARKUP is searched for stops but never shown."""

    REASONING = 0
    CONTENT = 1
    MARKUP = 2


class StopHit(NamedTuple):
    """The stop string that ended the answer and the number (from 1) of the token completing it."""

    string: str
    position: int


# Content, reasoning and tool call deltas that have become ready.
Taken = tuple[str, str, tuple[dict[str, Any], ...]]


def new_call_id() -> str:
    """A tool call id that no other call has."""
    return f"call_{secrets.token_hex(12)}"


class Assembly:
    """The sink of `OutputParser` for one answer. `position` is set by the caller per token."""

    __slots__ = (
        "_arguments",
        "_call_id",
        "_calls",
        "_content",
        "_matcher",
        "_queue",
        "_reasoning",
        "_search_all",
        "_spaces",
        "_trim",
        "calls_delivered",
        "hit",
        "position",
    )

    def __init__(
        self, stop: StopOptions, trim: bool, call_id: Callable[[], str] = new_call_id
    ) -> None:
        """`trim`: apply the content's white space rule (off for raw text)."""
        self._matcher = (
            StopMatcher(stop.strings, stop.include, stop.min_tokens) if stop.strings else None
        )
        self._search_all = stop.scope == "raw"
        self._trim = trim
        self._call_id = call_id
        self._queue: deque[tuple[Channel, str]] = deque()  # pieces behind the matcher's held text
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._spaces: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._arguments: list[str] = []  # fragments of the last entry of _calls
        self.calls_delivered = 0
        self.position = 0
        self.hit: StopHit | None = None

    def piece(self, channel: Channel, text: str) -> None:
        """Take the next text of the answer."""
        if not text or self.hit is not None:
            return
        if self._matcher is None or not (self._search_all or channel is Channel.CONTENT):
            if channel is Channel.REASONING:  # the common case, without another call
                self._reasoning.append(text)
            else:
                self._emit(channel, text)
            return
        self._queue.append((channel, text))
        scan = self._matcher.push(text, self.position)
        self._release(scan.release)
        if scan.hit is not None:
            self._queue.clear()
            self.hit = StopHit(scan.hit, self.position)

    def call_boundary(self) -> None:
        """A call begins: text before it is complete, white space that touches it vanishes."""
        self._flush()
        self._spaces.clear()

    def open_call(self, name: str) -> None:
        """Announce the next call: its index, id and whole name."""
        self._close_fragments()
        self._calls.append(
            {
                "index": self.calls_delivered,
                "id": self._call_id(),
                "type": "function",
                "function": {"name": name, "arguments": ""},
            }
        )
        self.calls_delivered += 1

    def arguments(self, fragment: str) -> None:
        """Append to the JSON text of the last announced call's arguments."""
        if not self._calls:
            self._calls.append({"index": self.calls_delivered - 1, "function": {"arguments": ""}})
        self._arguments.append(fragment)

    def finish(self) -> None:
        """End of the answer: what was held is released, or dropped by the white space rule."""
        self._flush()
        if not self.calls_delivered:
            self._content += self._spaces
        self._spaces.clear()

    def take(self) -> Taken:
        """Hand over what is ready."""
        content = reasoning = ""
        calls: tuple[dict[str, Any], ...] = ()
        if self._reasoning:
            reasoning = "".join(self._reasoning)
            self._reasoning.clear()
        if self._content:
            content = "".join(self._content)
            self._content.clear()
        if self._calls:
            self._close_fragments()
            calls = tuple(self._calls)
            self._calls.clear()
        return content, reasoning, calls

    def _flush(self) -> None:
        if self._queue:
            assert self._matcher is not None
            self._release(len(self._matcher.held))
            self._matcher.held = ""

    def _release(self, size: int) -> None:
        queue = self._queue
        while queue and size >= len(queue[0][1]):
            channel, text = queue.popleft()
            size -= len(text)
            self._emit(channel, text)
        if size:
            channel, text = queue.popleft()
            queue.appendleft((channel, text[size:]))
            self._emit(channel, text[:size])

    def _emit(self, channel: Channel, text: str) -> None:
        if channel is Channel.REASONING:
            self._reasoning.append(text)
        elif channel is Channel.CONTENT:
            if not self._trim:
                self._content.append(text)
                return
            shown = text.rstrip()
            if shown:
                if self._spaces:
                    self._content += self._spaces
                    self._spaces.clear()
                self._content.append(shown)
            if len(shown) < len(text):
                self._spaces.append(text[len(shown) :])

    def _close_fragments(self) -> None:
        if self._arguments:
            self._calls[-1]["function"]["arguments"] = "".join(self._arguments)
            self._arguments = []
