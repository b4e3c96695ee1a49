# SPDX-License-Identifier: Apache-2.0
"""Random JSON schemas of bounded answers: strings up to 16 characters, arrays up to 4 items."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]
_WORDS = ("name", "city", "size", "on", "tags", "größe", 'a"b', "x-1", "items", "value")
_MAX_LENGTH, _MAX_ITEMS, _MAX_DEPTH = 16, 4, 3


def random_schema(seed: int) -> Schema:
    """An object schema, the same for the same seed; some have definitions that they refer to."""
    generator = random.Random(seed)
    schema = _object(generator, 0)
    if generator.random() < 0.25:
        schema["$defs"] = {"thing": _object(generator, 2)}
        schema["properties"]["thing"] = {"$ref": "#/$defs/thing"}
        schema["required"] = [*schema.get("required", ()), "thing"]
    return schema


def _any(generator: random.Random, depth: int) -> Schema:
    leaves = [_string, _integer, _number, _boolean, _null, _enum, _const]
    inner = [_object, _array, _union]
    return generator.choice(leaves + (inner if depth < _MAX_DEPTH else []))(generator, depth)


def _object(generator: random.Random, depth: int) -> Schema:
    names = generator.sample(_WORDS, generator.randint(1, 4))
    schema: Schema = {
        "type": "object",
        "properties": {name: _any(generator, depth + 1) for name in names},
    }
    if generator.random() < 0.8:
        schema["required"] = generator.sample(names, generator.randint(0, len(names)))
    if generator.random() < 0.5:
        schema["additionalProperties"] = False
    return schema


def _array(generator: random.Random, depth: int) -> Schema:
    most = generator.randint(0, _MAX_ITEMS)
    schema = {"type": "array", "items": _any(generator, depth + 1), "maxItems": most}
    if generator.random() < 0.5:
        schema["minItems"] = generator.randint(0, most)
    return schema


def _union(generator: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(generator, depth + 1) for _ in range(2)]}


def _string(generator: random.Random, _depth: int) -> Schema:
    most = generator.randint(0, _MAX_LENGTH)
    kind = generator.randrange(4)
    if kind == 0:
        return {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,4}$", "maxLength": _MAX_LENGTH}
    if kind == 1:
        return {"type": "string", "format": "date"}
    if kind == 2:
        return {"type": "string", "minLength": generator.randint(0, most), "maxLength": most}
    return {"type": "string", "maxLength": most}


def _integer(generator: random.Random, _depth: int) -> Schema:
    if generator.random() < 0.5:
        return {"type": "integer"}
    low = generator.randint(-1000, 1000)
    return {"type": "integer", "minimum": low, "maximum": low + generator.randint(0, 5000)}


def _number(generator: random.Random, _depth: int) -> Schema:
    if generator.random() < 0.5:
        return {"type": "number"}
    return {"type": "number", "minimum": 0, "exclusiveMaximum": generator.randint(1, 100)}


def _boolean(_generator: random.Random, _depth: int) -> Schema:
    return {"type": "boolean"}


def _null(generator: random.Random, _depth: int) -> Schema:
    return (
        {"type": "null"}
        if generator.random() < 0.5
        else {"type": ["string", "null"], "maxLength": 5}
    )


def _enum(generator: random.Random, _depth: int) -> Schema:
    return {"enum": generator.sample(["red", "blau", 'q"', 1, 2.5, True, None, [1]], 3)}


def _const(generator: random.Random, _depth: int) -> Schema:
    return {"const": generator.choice(["only", 7, False, {"a": [1, 2]}])}
