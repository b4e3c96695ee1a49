# SPDX-License-Identifier: Apache-2.0
"""The output stage on plain text instead of token ids, whole or in chunks of bytes.

Behind `glmserve parse`. Markers are recognised by their spelling, also across chunks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from glmserve.text.byte_vocabulary import ByteVocabulary, MarkerScanner
from glmserve.text.output import OutputDelta, OutputProcessor
from glmserve.text.output_options import OutputOptions


def parse_text(
    chunks: Iterable[bytes], options: OutputOptions, finish_reason: str = "stop"
) -> Iterator[OutputDelta]:
    """Deltas of a text that comes in chunks, which may end anywhere; empty ones are left out."""
    vocabulary = ByteVocabulary()
    scanner = MarkerScanner(vocabulary)
    processor = OutputProcessor(vocabulary, options)
    for chunk in chunks:
        delta = processor.push(scanner.push(chunk))
        if delta.finish_reason is not None or any(delta[:3]):
            yield delta
        if delta.finish_reason is not None:
            return
    yield processor.push(scanner.flush(), finish_reason)


class ParsedAnswer:
    """Deltas joined to the answer that a client without streaming gets."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None

    def add(self, delta: OutputDelta) -> None:
        """Append one delta."""
        self._content.append(delta.text)
        self._reasoning.append(delta.reasoning_content)
        for call in delta.tool_calls:
            if "id" in call:
                assert call["index"] == len(self._calls)
                self._calls.append({"name": call["function"]["name"], "arguments": []})
            self._calls[call["index"]]["arguments"].append(call["function"]["arguments"])
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

    def as_dict(self) -> dict[str, Any]:
        """The answer; content is null if there are calls and no text, "" if there is neither."""
        calls = [
            {"name": call["name"], "arguments": json.loads("".join(call["arguments"]))}
            for call in self._calls
        ]
        return {
            "reasoning_content": "".join(self._reasoning) or None,
            "content": "".join(self._content) or (None if calls else ""),
            "tool_calls": calls,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
        }
