# SPDX-License-Identifier: Apache-2.0
"""What a client asks of its answer's form, in every spelling that other servers know.

OpenAI's `response_format`, vLLM's `structured_outputs` (formerly `guided_decoding` and `guided_*`)
and TensorRT-LLM's `guided_decoding_guide_type` with `guided_decoding_guide` all become one
`OutputConstraint`. Turning it into a grammar is `grammar`'s job; tools are no part of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from glmserve.errors import InvalidInput
from glmserve.text.client_json import check_depth, loads

MAX_CHOICES = 1024
MAX_SOURCE = 1 << 20  # characters of a schema, a regular expression or a grammar

Kind = Literal["json", "regex", "choice", "grammar"]


@dataclass(frozen=True)
class OutputConstraint:
    """`value` is a schema (object or bool), a pattern, a tuple of texts, or Lark/GBNF text."""

    kind: Kind
    value: Any
    field: str  # of the request, for errors
    strict: bool = True  # False: keywords of a schema that cannot be enforced are ignored
    whitespace: str | None = None  # pattern between JSON's tokens; None = a compact default


def take_constraint(values: dict[str, Any]) -> OutputConstraint | None:
    """Removes every key that constrains the output from sampling settings `values`.

    Raises InvalidInput naming the key; also when two of them ask for something.
    """
    if (after := values.pop("grammar_after", None)) is not None:
        raise InvalidInput("grammar_after", after, "follows from the prompt")
    found: list[OutputConstraint] = []
    guide = values.pop("guided_decoding_guide", None)
    for key, read in _READERS.items():
        value = values.pop(key, None)
        if value is None:
            continue
        constraint = read(key, (value, guide) if key == _GUIDE_TYPE else value)
        if constraint is not None:
            found.append(constraint)
        if key == _GUIDE_TYPE:
            guide = None
    if guide is not None:
        raise InvalidInput("guided_decoding_guide", guide, f"needs `{_GUIDE_TYPE}`")
    if len(found) > 1:
        reason = "only one may constrain the output: " + " and ".join(c.field for c in found)
        raise InvalidInput(found[1].field, found[1].value, reason)
    return found[0] if found else None


def _response_format(field: str, value: Any) -> OutputConstraint | None:
    value = _object(field, value)
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return _any_object(field)
    if kind == "json_schema":
        holder = value.get("json_schema", value)
        if not isinstance(holder, dict) or "schema" not in holder:
            raise InvalidInput(f"{field}.json_schema", holder, "must hold a `schema`")
        strict = holder.get("strict")
        if strict not in (None, True, False):
            raise InvalidInput(f"{field}.json_schema.strict", strict, "must be true or false")
        return _schema(f"{field}.json_schema.schema", holder["schema"], strict is not False)
    raise InvalidInput(f"{field}.type", kind, "must be text, json_object or json_schema")


def _structured(field: str, value: Any) -> OutputConstraint | None:
    value = {key: item for key, item in _object(field, value).items() if item not in (None, False)}
    whitespace = value.pop("whitespace_pattern", None)
    if whitespace is not None and not isinstance(whitespace, str):
        raise InvalidInput(f"{field}.whitespace_pattern", whitespace, "must be a pattern")
    if value.pop("disable_any_whitespace", None):
        whitespace = ""
    value.pop("disable_additional_properties", None)  # what is not declared is not written anyway
    value.pop("disable_fallback", None)  # there is one grammar library, so nothing to fall back to
    asked = [key for key in value if key in _KINDS]
    for key in value:
        if key not in _KINDS:
            raise InvalidInput(f"{field}.{key}", value[key], "is not supported")
    if len(asked) > 1:
        raise InvalidInput(field, sorted(asked), "only one may constrain the output")
    if not asked:
        return None
    constraint = _KINDS[asked[0]](f"{field}.{asked[0]}", value[asked[0]])
    if constraint is None or whitespace is None:
        return constraint
    return OutputConstraint(
        constraint.kind, constraint.value, constraint.field, constraint.strict, whitespace
    )


def _guide(field: str, value: Any) -> OutputConstraint | None:
    kind, guide = value
    if kind not in _GUIDES:
        raise InvalidInput(field, kind, f"must be one of {sorted(_GUIDES)}")
    if kind == "json":
        return _any_object(field)
    if guide is None:
        raise InvalidInput("guided_decoding_guide", guide, f"`{kind}` needs it")
    return _KINDS[_GUIDES[kind]]("guided_decoding_guide", guide)


def _any_object(field: str) -> OutputConstraint:
    return OutputConstraint("json", {"type": "object"}, field)


def _json_object(field: str, value: Any) -> OutputConstraint | None:
    if not isinstance(value, bool):
        raise InvalidInput(field, value, "must be true or false")
    return _any_object(field) if value else None


def _schema(field: str, value: Any, strict: bool = True) -> OutputConstraint:
    if isinstance(value, str):
        value = loads(field, _text(field, value))
    if not isinstance(value, dict | bool):
        raise InvalidInput(field, value, "a JSON schema is an object")
    check_depth(field, value)
    if (length := len(json.dumps(value))) > MAX_SOURCE:
        raise InvalidInput(field, length, f"longer than {MAX_SOURCE} characters")
    return OutputConstraint("json", value, field, strict)


def _regex(field: str, value: Any) -> OutputConstraint:
    return OutputConstraint("regex", _text(field, value), field)


def _grammar(field: str, value: Any) -> OutputConstraint:
    return OutputConstraint("grammar", _text(field, value), field)


def _choice(field: str, value: Any) -> OutputConstraint:
    if isinstance(value, str):
        value = loads(field, _text(field, value))
    if (
        not isinstance(value, list | tuple)
        or not 1 <= len(value) <= MAX_CHOICES
        or not all(isinstance(item, str) and item for item in value)
    ):
        raise InvalidInput(field, value, f"must be a list of 1 to {MAX_CHOICES} texts, none empty")
    return OutputConstraint("choice", tuple(value), field)


def _text(field: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidInput(field, value, "must be a text")
    if len(value) > MAX_SOURCE:
        raise InvalidInput(field, len(value), f"longer than {MAX_SOURCE} characters")
    return value


def _object(field: str, value: Any) -> Mapping[str, Any]:
    if isinstance(value, str):  # as a request parameter
        value = loads(field, value)
    if not isinstance(value, dict):
        raise InvalidInput(field, value, "must be an object")
    return value


_Reader = Callable[[str, Any], OutputConstraint | None]
_KINDS: Mapping[str, _Reader] = {
    "json": _schema,
    "json_object": _json_object,
    "regex": _regex,
    "grammar": _grammar,
    "choice": _choice,
}
_GUIDES = {
    "json": "json_object",
    "json_schema": "json",
    "regex": "regex",
    "ebnf_grammar": "grammar",
}
_GUIDE_TYPE = "guided_decoding_guide_type"
_READERS: Mapping[str, _Reader] = {
    "response_format": _response_format,
    "structured_outputs": _structured,
    "guided_decoding": _structured,
    "guided_json": _schema,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
    "grammar": _grammar,
    _GUIDE_TYPE: _guide,
}
