# SPDX-License-Identifier: Apache-2.0
"""JSON schemas for llguidance: what a schema leaves open is bounded where that does no harm.

A model under a grammar may run on wherever the grammar lets it. So white space is bounded, an
object with declared properties gets no others, and integers stay below 18 digits; every answer
still satisfies the client's schema. Which schemas are refused is llguidance's word.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# A space, or a line break and its indentation: what compact and pretty printers write.
WHITESPACE = r"(\n {0,32}| )?"
_INTEGER_BOUND = 10**18 - 1  # 18 digits: the most that the grammar's range patterns take
_MAX_DEPTH = 64
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties")
_BRANCHES = ("allOf", "anyOf", "oneOf", "$ref", "if")
_OPEN = ("patternProperties", "unevaluatedProperties", "additionalProperties", "minProperties")


def prepared(schema: Any, strict: bool, whitespace: str | None = None) -> Any:
    """The schema with its bounds and with llguidance's options in `x-guidance`.

    strict: refuse keywords that cannot be enforced; else they are ignored and oneOf is read as
    anyOf.
    """
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        return schema
    bounded = _bounded(schema, closes=not _composes(schema, 0), depth=0)
    bounded["x-guidance"] = {
        "whitespace_flexible": True,
        "whitespace_pattern": WHITESPACE if whitespace is None else whitespace,
        "lenient": not strict,
        "coerce_one_of": not strict,
    }
    return bounded


def _bounded(schema: Any, closes: bool, depth: int) -> Any:
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return schema
    result = {key: value for key, value in schema.items() if key != "x-guidance"}
    for key in _MAPS:
        if isinstance(result.get(key), dict):
            result[key] = {
                name: _bounded(value, closes, depth + 1) for name, value in result[key].items()
            }
    for key in _LISTS:
        if isinstance(result.get(key), list):
            result[key] = [_bounded(value, closes, depth + 1) for value in result[key]]
    for key in _SINGLE:
        if key in result:
            result[key] = _bounded(result[key], closes, depth + 1)
    if closes and isinstance(result.get("properties"), dict):
        if result["properties"] and not any(key in result for key in (*_OPEN, *_BRANCHES)):
            result["additionalProperties"] = False
    if _is_integer(result) and not any(key in result for key in ("enum", "const", *_BRANCHES)):
        if "maximum" not in result and "exclusiveMaximum" not in result:
            result["maximum"] = max(_INTEGER_BOUND, _number(result.get("minimum")))
        if "minimum" not in result and "exclusiveMinimum" not in result:
            result["minimum"] = min(-_INTEGER_BOUND, _number(result.get("maximum")))
    return result


def _is_integer(schema: Mapping[str, Any]) -> bool:
    kinds = schema.get("type")
    return kinds == "integer" or (
        isinstance(kinds, list) and "integer" in kinds and "number" not in kinds
    )


def _number(value: Any) -> float:
    return value if isinstance(value, int | float) else 0


def _composes(schema: Any, depth: int) -> bool:
    """True if objects are put together from several schemas: none of these may be closed."""
    if isinstance(schema, list):
        return any(_composes(item, depth + 1) for item in schema)
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return False
    if isinstance(schema.get("allOf"), list):
        return True
    if "properties" in schema and any(key in schema for key in _BRANCHES):
        return True
    return any(
        _composes(value, depth + 1)
        for key, value in schema.items()
        if key not in ("enum", "const", "default", "examples")
    )
