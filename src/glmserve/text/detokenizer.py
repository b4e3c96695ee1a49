# SPDX-License-Identifier: Apache-2.0
"""Incremental detokenizer: one token id in, the text that has become complete out.

Bytes are collected until they are whole characters; U+FFFD appears only for bytes that can never
complete. It needs no prompt context. Which tokens are markers is the parser's business.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from glmserve.errors import GlmServeError
from glmserve.text.tokenizer import Entry


class TokenWithoutText(GlmServeError):
    """The engine delivered an id without an entry in the vocabulary: a padding row of the head."""

    def __init__(self, token: int) -> None:
        super().__init__(f"token id {token} has no text")
        self.token = token

    def __reduce__(self) -> tuple[type[TokenWithoutText], tuple[int]]:
        return type(self), (self.token,)


class Detokenizer:
    """State of one stream: the bytes of a character that is not complete yet (at most three)."""

    __slots__ = ("_decoder", "_entries", "_pending")

    def __init__(self, entries: Sequence[Entry]) -> None:
        """`entries`: `Tokenizer.entries`."""
        self._entries = entries
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = False

    def push(self, token: int) -> str:
        """Text completed by `token`; "" for special tokens. Raises TokenWithoutText."""
        entry = self._entries[token] if 0 <= token < len(self._entries) else None
        if type(entry) is str and (not self._pending or not entry):
            return entry
        if entry is None:
            raise TokenWithoutText(token)
        text = self._decoder.decode(entry if isinstance(entry, bytes) else entry.encode())
        self._pending = self._decoder.getstate()[0] != b""
        return text

    def flush(self) -> str:
        """U+FFFD for the bytes that were still waiting, else ""; the stream may go on."""
        if not self._pending:
            return ""
        self._pending = False
        text = self._decoder.decode(b"", True)
        self._decoder.reset()
        return text
