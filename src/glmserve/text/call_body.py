# SPDX-License-Identifier: Apache-2.0
"""The inside of one tool call: key and value tags in, growing JSON text of the arguments out.

String values go out as they come; values of every other type go out whole, converted by their
schema. `</arg_value>` counts as a tag only if a key, the call's end or the output's end follows,
`</tool_call>` only outside a value: anything else inside a value is data.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import IntEnum
from json.encoder import encode_basestring

from glmserve.text import markers
from glmserve.text.argument_value import ValueType
from glmserve.text.tool_schema import Parameters

# White space, or a line break that the model wrote as a backslash and an n. A backslash at the
# end may still become one.
_BLANK = re.compile(r"(?:\s|\\n)*\\?")


class Progress(IntEnum):
    """What a marker did to the call."""

    OPEN = 0
    CLOSED = 1
    NEXT = 2  # closed by the <tool_call> of the next call


class _State(IntEnum):
    BETWEEN = 0
    KEY = 1
    AFTER_KEY = 2
    VALUE = 3
    CLOSING = 4  # after </arg_value>: a tag or data?


class _BlankRun:
    """Text that waits while it may still be nothing but blanks; linear in its length."""

    __slots__ = ("_carry", "_parts")

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._carry = ""

    def add(self, text: str) -> bool:
        """Append; False once the run has turned out not to be blank."""
        self._parts.append(text)
        text = self._carry + text
        self._carry = "\\" if text.endswith("\\") else ""
        return _BLANK.fullmatch(text) is not None

    def joined(self) -> str:
        return "".join(self._parts)


class CallBody:
    """State machine of one call's arguments."""

    __slots__ = ("_emit", "_key", "_pairs", "_parameters", "_parts", "_run", "_state", "_type")

    def __init__(self, parameters: Parameters | None, emit: Callable[[str], None] | None) -> None:
        """`parameters`: None for an undeclared tool. `emit`: None to parse without output."""
        self._parameters = parameters or Parameters({})
        self._emit = emit
        self._state = _State.BETWEEN
        self._pairs = 0
        self._parts: list[str] = []  # of the key, or of a value that goes out whole
        self._key = ""
        self._type: ValueType | None = None
        self._run = _BlankRun()

    def text(self, text: str) -> None:
        """Feed ordinary text."""
        state = self._state
        if state is _State.VALUE:
            self._value_text(text)
        elif state is _State.KEY:
            self._parts.append(text)
        elif state is _State.AFTER_KEY:
            if not self._run.add(text):  # <arg_value> is missing
                waited = self._run.joined().lstrip()
                self._begin_value()
                self._value_text(waited)
        elif state is _State.CLOSING and not self._run.add(text):
            self._reopen_value("")
        # Text between pairs means nothing and is dropped.

    def marker(self, literal: str) -> Progress:
        """Feed a marker; any but OPEN ends the call."""
        state = self._state
        if state is _State.VALUE:
            if literal == markers.VALUE_END:
                self._state, self._run = _State.CLOSING, _BlankRun()
            else:
                self._value_text(literal)
        elif state is _State.CLOSING:
            return self._closing_marker(literal)
        elif literal == markers.CALL_END:
            self._close()
            return Progress.CLOSED
        elif literal == markers.CALL:
            self._close()
            return Progress.NEXT
        elif state is _State.KEY:
            self._key_marker(literal)
        elif literal == markers.KEY:
            self._state, self._parts = _State.KEY, []
        elif state is _State.AFTER_KEY:
            self._after_key_marker(literal)
        return Progress.OPEN

    def finish(self) -> None:
        """End of output: complete pairs and a cut string stand, anything else is left out."""
        if self._state is _State.CLOSING:
            self._end_value()
        elif self._state is _State.VALUE and self._type is not None and self._type.is_string:
            self._write('"')
        self._close()

    def _key_marker(self, literal: str) -> None:
        if literal in (markers.KEY_END, markers.VALUE):
            self._key = "".join(self._parts).strip()
            self._state, self._run = _State.AFTER_KEY, _BlankRun()
            if literal == markers.VALUE:
                self._begin_value()
        elif literal == markers.KEY:
            self._parts = []  # a doubled tag, or a key that was never closed
        elif literal != markers.VALUE_END:
            self._parts.append(literal)

    def _after_key_marker(self, literal: str) -> None:
        if literal == markers.VALUE:
            self._begin_value()
        elif literal == markers.VALUE_END:  # an empty value without its opening tag
            self._begin_value()
            self._state, self._run = _State.CLOSING, _BlankRun()
        elif literal != markers.KEY_END:
            self.text(literal)

    def _closing_marker(self, literal: str) -> Progress:
        if literal == markers.KEY:
            self._end_value()
            self._state, self._parts = _State.KEY, []
        elif literal == markers.CALL_END:
            self._end_value()
            self._close()
            return Progress.CLOSED
        elif literal == markers.VALUE_END:
            self._reopen_value("")
            self._state, self._run = _State.CLOSING, _BlankRun()
        else:
            self._reopen_value(literal)
        return Progress.OPEN

    def _begin_value(self) -> None:
        self._state = _State.VALUE
        self._type = self._parameters.value_type(self._key)
        if self._type.is_string:
            self._write_key()
            self._write('"')
        else:
            self._parts = []

    def _value_text(self, text: str) -> None:
        assert self._type is not None
        if not self._type.is_string:
            self._parts.append(text)
        elif self._emit is not None and text:
            self._emit(encode_basestring(text)[1:-1])

    def _reopen_value(self, literal: str) -> None:
        self._state = _State.VALUE
        self._value_text(markers.VALUE_END + self._run.joined() + literal)

    def _end_value(self) -> None:
        assert self._type is not None
        if self._type.is_string:
            self._write('"')
        else:
            self._write_key()
            self._write(self._type.to_json("".join(self._parts)))
        self._type = None

    def _write_key(self) -> None:
        self._write(("{" if self._pairs == 0 else ", ") + encode_basestring(self._key) + ": ")
        self._pairs += 1

    def _close(self) -> None:
        self._write("}" if self._pairs else "{}")

    def _write(self, fragment: str) -> None:
        if self._emit is not None:
            self._emit(fragment)
