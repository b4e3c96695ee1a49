# SPDX-License-Identifier: Apache-2.0
"""Stop strings over a stream: what may go out, what must wait, where the answer ends.

Held back is only the longest end of the text that is a proper beginning of some stop string. The
match that completes first wins, ties by the order of the list. Which text is searched (all of it
or the content alone) is decided by the caller (`assembly`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Scan(NamedTuple):
    """Result of one `push`: so many of the waiting and new characters may go out."""

    release: int
    hit: str | None  # the stop string that completed; everything not released is then void


class StopMatcher:
    """State: the held end of the text, at most the longest stop string less one character."""

    __slots__ = ("_include", "_longest", "_min_tokens", "_prefixes", "_strings", "held")

    def __init__(self, strings: Sequence[str], include: bool = False, min_tokens: int = 0) -> None:
        """`strings` must not be empty nor hold empty strings (checked by StopOptions)."""
        assert strings and all(strings)
        self._strings = tuple(strings)
        self._include = include
        self._min_tokens = min_tokens
        self._longest = max(map(len, strings)) - 1
        self._prefixes = frozenset(s[:n] for s in strings for n in range(1, len(s)))
        self.held = ""

    def push(self, text: str, position: int) -> Scan:
        """Search `text`, which token number `position` (from 1) has completed.

        A match that completes before `min_tokens` tokens is ordinary text.
        """
        text = self.held + text
        start = 0
        while (found := self._first(text, start)) is not None:
            begin, string = found
            if position >= self._min_tokens:
                self.held = ""
                return Scan(begin + len(string) if self._include else begin, string)
            start = begin + len(string)
        keep = self._overlap(text, start)
        self.held = text[len(text) - keep :]
        return Scan(len(text) - keep, None)

    def _first(self, text: str, start: int) -> tuple[int, str] | None:
        best: tuple[int, str] | None = None
        for string in self._strings:
            begin = text.find(string, start)
            if begin >= 0 and (best is None or begin + len(string) < best[0] + len(best[1])):
                best = begin, string
        return best

    def _overlap(self, text: str, start: int) -> int:
        size = len(text)
        for keep in range(min(self._longest, size - start), 0, -1):
            if text[size - keep :] in self._prefixes:
                return keep
        return 0
