# SPDX-License-Identifier: Apache-2.0
"""Turns the text of one tool argument into JSON of the type that its schema asks for.

A value that does not convert is delivered as its text: an argument is never dropped. Types are
tried in the order null, integer, number, boolean, object, array, string.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from json.encoder import encode_basestring
from typing import Any, NoReturn

_ORDER = ("null", "integer", "number", "boolean", "object", "array")
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_ANY_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,6})?")
_LONGEST_NUMBER = 4000  # digits; Python refuses to convert much more
_LONGEST_LITERAL = 65536  # characters of a Python literal


@dataclass(frozen=True)
class ValueType:
    """Types that a parameter may have (None: any) and, if it lists them, its values."""

    kinds: frozenset[str] | None
    choices: Sequence[Any] | None = None

    @property
    def is_string(self) -> bool:
        """True if text can only be a string: it may go out before it is complete."""
        return self.kinds is not None and len(self.kinds) == 1 and "string" in self.kinds

    def to_json(self, text: str) -> str:
        """JSON of the value that `text` stands for."""
        if self.kinds is None:
            return text.strip() if _parses(text) else encode_basestring(text)
        candidates = [
            found for kind in _ORDER if kind in self.kinds if (found := _convert(kind, text))
        ]
        if "string" in self.kinds:
            candidates.append(encode_basestring(text))
        elif not candidates and isinstance(inner := _parse(text), str):  # a number in quotes
            candidates = [
                found for kind in _ORDER if kind in self.kinds if (found := _convert(kind, inner))
            ]
        if self.choices is not None:
            for candidate in candidates:
                if any(_same(json.loads(candidate), choice) for choice in self.choices):
                    return candidate
        return candidates[0] if candidates else encode_basestring(text)


def kind_of(value: Any) -> str:
    """JSON schema's name for the type of a parsed value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def _convert(kind: str, text: str) -> str | None:
    """JSON of `text` read as `kind`, None if it cannot be."""
    word = text.strip()
    if kind == "null":
        return "null" if word == "null" else None
    if kind == "boolean":
        return word.lower() if word.lower() in ("true", "false") else None
    if kind in ("integer", "number"):
        return _number(word, kind == "integer")
    return _container(word, dict if kind == "object" else list)


def _number(word: str, integer: bool) -> str | None:
    if len(word) > _LONGEST_NUMBER or not _ANY_NUMBER.fullmatch(word):
        return None
    value = Decimal(word)
    if value.adjusted() > 308:  # JSON readers would make it infinite
        return None if not integer or "e" in word.lower() else str(int(value))
    if integer:
        return str(int(value)) if value == value.to_integral_value() else None
    if _JSON_NUMBER.fullmatch(word):
        return word
    return str(int(word)) if word.lstrip("+-").isdigit() else repr(float(word))


def _container(word: str, wanted: type[dict[str, Any]] | type[list[Any]]) -> str | None:
    value = _parse(word)
    if isinstance(value, wanted):
        return word
    # A JSON text that was escaped once more, with or without the quotes around it.
    inner = value if isinstance(value, str) else _parse(f'"{word}"')
    if isinstance(inner, str) and isinstance(_parse(inner), wanted):
        return inner.strip()
    if len(word) > _LONGEST_LITERAL:
        return None
    try:
        value = ast.literal_eval(word)
        if wanted is list and isinstance(value, tuple):
            value = list(value)
        if not isinstance(value, wanted):
            return None
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
        written.encode()  # refuses lone surrogates
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    return written


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_UNPARSED = object()


def _parse(text: str) -> Any:
    """The value of a JSON text; a private object if it is none (NaN and Infinity are none)."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _UNPARSED


def _parses(text: str) -> bool:
    return _parse(text) is not _UNPARSED


def _same(left: Any, right: Any) -> bool:
    return kind_of(left) == kind_of(right) and bool(left == right)
