# SPDX-License-Identifier: Apache-2.0
"""Lark rules for GLM's own tool-call markup, arguments by the tools' schemas.

`<tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value>...</tool_call>`, markers as control
tokens by id. Keys come in the schema's order, required ones always; a string's value is raw text,
every other value is JSON. `call_body` reads the same values back. `format` is an annotation here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llguidance import regex_to_lark

from glmserve.errors import InvalidInput
from glmserve.text import markers
from glmserve.text.argument_value import kind_of
from glmserve.text.json_grammar import prepared

_MAX_DEPTH = 16
_ANY_TEXT = r"/(?s:.)*/"
_OTHER_KINDS = ("null", "boolean", "integer", "number", "object", "array")
_TAGS = (
    markers.CALL,
    markers.CALL_END,
    markers.KEY,
    markers.KEY_END,
    markers.VALUE,
    markers.VALUE_END,
)


def parameters_field(name: str) -> str:
    """What errors call the schema of a tool: by name, as the callable ones may be a few of all."""
    return f'tools["{name}"].function.parameters'


class CallRules:
    """Lark rules of the calls of several tools: `rules`, in which tool n's is call_n."""

    def __init__(self, tools: Sequence[Mapping[str, Any]], marker_id: Callable[[str], int | None]):
        """Raises InvalidInput naming the tool's schema, or `tools` without the markers."""
        ids = {name: marker_id(name) for name in _TAGS}
        for name, token in ids.items():
            if token is None:
                raise InvalidInput("tools", name, "this checkpoint has no such token")
        self._tag = {name: f"<[{token}]>" for name, token in ids.items()}
        self.rules: list[str] = []
        for number, tool in enumerate(tools):
            function = tool["function"]
            strict = function.get("strict") is True
            self.rules += self._call(number, function, strict)
        self._count = len(tools)

    def any_call(self) -> str:
        """An expression for one call of any of the tools."""
        return " | ".join(f"call_{number}" for number in range(self._count))

    def _call(self, number: int, function: Mapping[str, Any], strict: bool) -> list[str]:
        schema = function.get("parameters") or {}
        values = _Values(schema, strict, number, parameters_field(function["name"]))
        required = schema.get("required")
        required = required if isinstance(required, list) else []
        pairs = []
        declared = schema.get("properties")
        for key, value in (declared if isinstance(declared, dict) else {}).items():
            pair = self._pair(json.dumps(key, ensure_ascii=False), values.expression(value))
            pairs.append(pair if key in required else f"({pair})?")
        if schema.get("additionalProperties") not in (None, False):
            pairs.append(f"({self._pair('/[A-Za-z0-9_.-]{1,64}/', _ANY_TEXT)})*")
        body = " ".join([json.dumps(function["name"]), *pairs])
        rule = f"call_{number}: {self._tag[markers.CALL]} {body} {self._tag[markers.CALL_END]}"
        return [rule, *values.terminals]

    def _pair(self, key: str, value: str) -> str:
        tag = self._tag
        return (
            f"{tag[markers.KEY]} {key} {tag[markers.KEY_END]}"
            f" {tag[markers.VALUE]} {value} {tag[markers.VALUE_END]}"
        )


class _Values:
    """Expressions for the values of one tool's parameters."""

    def __init__(self, root: Mapping[str, Any], strict: bool, number: int, field: str) -> None:
        self._root, self._strict, self._number, self._field = root, strict, number, field
        self.terminals: list[str] = []  # rules that the expressions name

    def expression(self, schema: Any, depth: int = 0) -> str:
        """A parenthesised Lark expression for what stands between the value's tags."""
        if not isinstance(schema, dict) or depth > _MAX_DEPTH:
            return _ANY_TEXT
        target = self._target(schema)
        if target is not None:
            return self.expression(target, depth + 1)
        if "const" in schema:
            return self._choices([schema["const"]])
        if isinstance(schema.get("enum"), list) and schema["enum"]:
            return self._choices(schema["enum"])
        for word in ("anyOf", "oneOf"):
            if isinstance(schema.get(word), list) and schema[word]:
                branches = [self.expression(branch, depth + 1) for branch in schema[word]]
                return "(" + " | ".join(dict.fromkeys(branches)) + ")"
        kinds = schema.get("type", [])
        kinds = [kinds] if isinstance(kinds, str) else list(kinds)
        if kinds and schema.get("nullable") is True:
            kinds.append("null")
        if not kinds and not (schema.keys() & {"properties", "items", "allOf", "$ref"}):
            kinds = ["string", *_OTHER_KINDS]
        if "string" not in kinds:
            return self._json(schema)
        text = self._text(schema)
        others = [kind for kind in kinds if kind != "string"]
        if not others or text == _ANY_TEXT:
            return text
        return f"({text} | {self._json({**schema, 'type': others})})"

    def _choices(self, values: Sequence[Any]) -> str:
        choices = [
            json.dumps(value, ensure_ascii=False)
            if isinstance(value, str)
            else self._json({"const": value})
            if isinstance(value, dict | list)
            else json.dumps(json.dumps(value))
            for value in values
        ]
        return "(" + " | ".join(dict.fromkeys(choices)) + ")"

    def _text(self, schema: Mapping[str, Any]) -> str:
        """Raw text under minLength, maxLength and pattern."""
        low, high = schema.get("minLength", 0), schema.get("maxLength")
        for word, bound in (("minLength", low), ("maxLength", high)):
            if bound is not None and (kind_of(bound) != "integer" or bound < 0):
                raise InvalidInput(f"{self._field} {word}", bound, "must be a count")
        terms = []
        if low or high is not None:
            terms.append(f"/(?s:.){{{low},{'' if high is None else high}}}/")
        if isinstance(schema.get("pattern"), str):
            terms.append(f"/{regex_to_lark(_whole(schema['pattern']), 'dw')}/")
        if len(terms) < 2:
            return (terms or [_ANY_TEXT])[0]
        name = f"TEXT_{self._number}_{len(self.terminals)}"  # only terminals can be intersected
        self.terminals.append(f"{name}: {' & '.join(terms)}")
        return name

    def _json(self, schema: Mapping[str, Any]) -> str:
        """A JSON value; the definitions that it may refer to travel with it."""
        shared = {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
        return "%json " + json.dumps(prepared({**shared, **schema}, self._strict))

    def _target(self, schema: Mapping[str, Any]) -> Any:
        """What a reference into this tool's schema points to; None if it is none."""
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return None
        node: Any = self._root
        for step in reference[2:].split("/"):
            step = step.replace("~1", "/").replace("~0", "~")
            if not isinstance(node, dict) or step not in node:
                raise InvalidInput(f"{self._field} $ref", reference, "points nowhere")
            node = node[step]
        return node


def _whole(pattern: str) -> str:
    """A schema's pattern finds its match anywhere; a lexeme matches from end to end."""
    parts = []
    for part in _alternatives(pattern):
        start = "" if part.startswith("^") else "(?s:.)*"
        ends = part.endswith("$") and not part.endswith("\\$")
        inner = part[1:] if part.startswith("^") else part
        inner = inner[:-1] if ends else inner
        parts.append(f"{start}(?:{inner}){'' if ends else '(?s:.)*'}")
    return "|".join(parts)


def _alternatives(pattern: str) -> list[str]:
    """The pattern cut at its outermost bars."""
    parts, depth, bracket, skip = [""], 0, False, False
    for character in pattern:
        if skip:
            skip = False
        elif character == "\\":
            skip = True
        elif bracket:
            bracket = character != "]"
        elif character == "[":
            bracket = True
        elif character == "|" and depth == 0:
            parts.append("")
            continue
        else:
            depth += (character == "(") - (character == ")")
        parts[-1] += character
    return parts
