# SPDX-License-Identifier: Apache-2.0
"""A vocabulary of single bytes and GLM's added tokens, for text that has no token ids.

The `parse` command feeds text through it: every byte is a token, a marker spelled in the text is
one token, and a chunk may end anywhere, also inside a marker. Serving never uses it: there a
marker is an id, and text that spells one is text.
"""

from __future__ import annotations

import re
from typing import Protocol

from glmserve.text import markers
from glmserve.text.tokenizer import Entry

_LITERALS = tuple(name.encode() for name, _ in markers.ADDED_TOKENS)
_PATTERN = re.compile(b"|".join(map(re.escape, _LITERALS)))
_PREFIXES = frozenset(name[:n] for name in _LITERALS for n in range(1, len(name)))
_LONGEST = max(map(len, _LITERALS)) - 1


class Vocabulary(Protocol):
    """What the output stage needs of a tokenizer."""

    @property
    def entries(self) -> tuple[Entry, ...]: ...

    @property
    def markers(self) -> dict[int, str]: ...


class ByteVocabulary:
    """Ids 0..255 are the bytes, the added tokens follow."""

    def __init__(self) -> None:
        pieces: list[Entry] = [bytes([byte]) for byte in range(256)]
        pieces[:128] = [chr(byte) for byte in range(128)]
        pieces += ["" if special else name for name, special in markers.ADDED_TOKENS]
        self.entries: tuple[Entry, ...] = tuple(pieces)
        self.ids = {name: 256 + n for n, (name, _) in enumerate(markers.ADDED_TOKENS)}
        self.literals = {name.encode(): token for name, token in self.ids.items()}
        self.markers = {self.ids[name]: name for name in markers.OUTPUT_MARKERS}


class MarkerScanner:
    """Bytes in, ids of a ByteVocabulary out; holds an end that may become a marker."""

    def __init__(self, vocabulary: ByteVocabulary) -> None:
        self._ids = vocabulary.literals
        self._held = b""

    def push(self, chunk: bytes) -> list[int]:
        """Ids that have become certain."""
        data = self._held + chunk
        ids: list[int] = []
        start = 0
        for match in _PATTERN.finditer(data):
            ids += data[start : match.start()]
            ids.append(self._ids[match.group()])
            start = match.end()
        keep = min(_LONGEST, len(data) - start)
        while keep and data[len(data) - keep :] not in _PREFIXES:
            keep -= 1
        ids += data[start : len(data) - keep]
        self._held = data[len(data) - keep :]
        return ids

    def flush(self) -> list[int]:
        """End of text: a half marker is ordinary text."""
        held, self._held = self._held, b""
        return list(held)
