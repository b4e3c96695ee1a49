# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's tokenizer: text to ids through Rust, ids to bytes through a table built once.

All ids come from tokenizer.json. The table serves the detokenizer: complete text where a token is
valid UTF-8 by itself, raw bytes where it is a part of a character, "" for special tokens and None
for ids that have no entry. Streaming, stop strings and parsing are not its job.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from glmserve.errors import CheckpointError
from glmserve.text import markers

Ids = npt.NDArray[np.int32]
Entry = str | bytes | None


class Tokenizer:
    """Wraps a checkpoint directory's tokenizer.json (and the eos ids of generation_config.json)."""

    def __init__(self, checkpoint_dir: str | Path) -> None:
        """Read the files; raises CheckpointError if tokenizer.json is missing or unreadable."""
        self._directory = Path(checkpoint_dir)
        try:
            source = (self._directory / "tokenizer.json").read_text("utf-8")
            spec: dict[str, Any] = json.loads(source)
            self._rust = tokenizers.Tokenizer.from_str(source)
        except Exception as error:  # the Rust side raises plain Exception
            raise CheckpointError(f"tokenizer.json cannot be used: {error}") from error
        self._added: dict[str, int] = {
            token["content"]: int(token["id"]) for token in spec["added_tokens"]
        }
        self.entries: tuple[Entry, ...] = _byte_table(spec)
        self.eos_token_ids: tuple[int, ...] = self._find_eos()
        self.markers: dict[int, str] = {
            self._added[name]: name for name in markers.OUTPUT_MARKERS if name in self._added
        }

    @property
    def vocab_size(self) -> int:
        """Ids below this may have text; the model head's rows above it are padding."""
        return len(self.entries)

    @property
    def added_tokens(self) -> dict[str, int]:
        """Literal of every added token (special or not) and its id."""
        return self._added

    def marker_id(self, literal: str) -> int | None:
        """Id of an added token by its literal, or None if the checkpoint has no such token."""
        return self._added.get(literal)

    def encode(self, text: str, markers: bool = True) -> Ids:
        """Ids [T] int32 of `text`; with `markers` off, added tokens' literals are ordinary text."""
        rust = self._rust if markers else self._plain
        (encoding,) = rust.encode_batch_fast([text], add_special_tokens=False)
        return np.asarray(encoding.ids, dtype=np.int32)

    def encode_shielded(self, text: str, opening: str, closing: str) -> Ids:
        """Ids [T] of rendered text in which `opening`..`closing` shields literals of markers.

        A shielded literal is text that came from a user or a tool: it is encoded as its letters,
        in one piece with the text around it. Literals outside shields are the template's own.
        """
        pattern = re.compile(
            f"{re.escape(opening)}|{re.escape(closing)}|" + "|".join(self._literal_patterns)
        )
        pieces: list[Ids] = []
        plain: list[str] = []
        start, shielded = 0, False
        for match in pattern.finditer(text):
            plain.append(text[start : match.start()])
            start = match.end()
            found = match.group()
            if found in (opening, closing):
                shielded = found == opening
            elif shielded:
                plain.append(found)
            else:
                pieces += [self._encode_plain(plain), np.array([self._added[found]], np.int32)]
                plain = []
        plain.append(text[start:])
        pieces.append(self._encode_plain(plain))
        return np.concatenate(pieces)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Whole text of `ids`, incomplete characters as U+FFFD; for tests and commands."""
        by_id = {} if skip_special else {self._added[name]: name for name in self._added}
        out = bytearray()
        for token in ids:
            entry = by_id.get(int(token), self.entries[int(token)])
            if entry is not None:
                out += entry.encode() if isinstance(entry, str) else entry
        return out.decode("utf-8", "replace")

    def _encode_plain(self, parts: list[str]) -> Ids:
        text = "".join(parts)
        return self.encode(text, markers=False) if text else np.zeros(0, np.int32)

    @cached_property
    def _literal_patterns(self) -> list[str]:
        return [re.escape(name) for name in sorted(self._added, key=len, reverse=True)]

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """The same vocabulary without added tokens; built when first asked for."""
        spec = json.loads((self._directory / "tokenizer.json").read_text("utf-8"))
        return tokenizers.Tokenizer.from_str(json.dumps({**spec, "added_tokens": []}))

    def _find_eos(self) -> tuple[int, ...]:
        path = self._directory / "generation_config.json"
        if path.exists():
            declared = json.loads(path.read_text("utf-8")).get("eos_token_id")
            if isinstance(declared, int):
                return (declared,)
            if declared:
                return tuple(int(token) for token in declared)
        return tuple(self._added[name] for name in markers.EOS if name in self._added)


def _byte_table(spec: dict[str, Any]) -> tuple[Entry, ...]:
    """The text of every id; byte-level alphabets write each byte as one printable character."""
    to_byte = {character: byte for byte, character in byte_alphabet().items()}
    vocabulary: dict[str, int] = spec["model"]["vocab"]
    highest = max(
        max(vocabulary.values(), default=-1),
        max((token["id"] for token in spec["added_tokens"]), default=-1),
    )
    table: list[Entry] = [None] * (highest + 1)
    for piece, token in vocabulary.items():
        raw = bytes([to_byte[character] for character in piece])
        try:
            table[token] = raw.decode("utf-8")
        except UnicodeDecodeError:
            table[token] = raw
    for added in spec["added_tokens"]:
        table[added["id"]] = "" if added["special"] else added["content"]
    return tuple(table)


def byte_alphabet() -> dict[int, str]:
    """Byte-level BPE's printable stand-in for each byte (GPT-2's table).

    Printable Latin-1 characters stand for themselves; the other bytes take the code points from
    256 on, in order.
    """
    own = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in own)
    return {byte: chr(byte) for byte in own} | {
        byte: chr(256 + place) for place, byte in enumerate(others)
    }
