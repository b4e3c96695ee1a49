# SPDX-License-Identifier: Apache-2.0
"""Which JSON types a tool's parameters may have, read from their JSON schemas.

Follows local $ref, allOf, anyOf, oneOf, type lists, enum and const. It decides types only, it does
not validate: an argument that fits no type is still delivered (`argument_value`). Schemas come
from clients, so nothing here trusts their shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from glmserve.text.argument_value import ValueType, kind_of

_MAX_DEPTH = 16  # nested or circular references give up here: the type is then unknown
_KINDS = frozenset(("null", "integer", "number", "boolean", "object", "array", "string"))
_UNTYPED = ValueType(None)


class ToolSet:
    """The tools of one request by name."""

    __slots__ = ("_by_name",)

    def __init__(self, tools: Iterable[Mapping[str, Any]]) -> None:
        """`tools` as OpenAI writes them; a bare function object is taken too."""
        self._by_name: dict[str, Parameters] = {}
        for tool in tools:
            function = tool.get("function", tool)
            if isinstance(function, Mapping) and isinstance(function.get("name"), str):
                self._by_name[function["name"]] = Parameters(function.get("parameters"))

    def parameters(self, name: str) -> Parameters | None:
        """The parameters of a declared tool, None if no tool has this name."""
        return self._by_name.get(name)


class Parameters:
    """The parameters of one tool; types are worked out once per key."""

    __slots__ = ("_root", "_types")

    def __init__(self, schema: Any) -> None:
        self._root: Mapping[str, Any] = schema if isinstance(schema, Mapping) else {}
        self._types: dict[str, ValueType] = {}

    def value_type(self, key: str) -> ValueType:
        """Type of one parameter; untyped if it is not declared."""
        found = self._types.get(key)
        if found is None:
            schemas = list(self._find(self._root, key, 0))
            found = _UNTYPED
            if schemas:
                schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
                found = ValueType(self._kinds(schema, 0), self._choices(schema, 0))
            self._types[key] = found
        return found

    def _find(self, schema: Any, key: str, depth: int) -> Iterable[Any]:
        """Schemas declared for `key`, also inside references and combinations."""
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return
        properties = schema.get("properties")
        if isinstance(properties, Mapping) and key in properties:
            yield properties[key]
            return
        inner = [self._target(schema)]
        for word in ("allOf", "anyOf", "oneOf"):
            inner += _items(schema.get(word))
        declared = False
        for branch in inner:
            for found in self._find(branch, key, depth + 1):
                declared = True
                yield found
        if not declared and isinstance(schema.get("additionalProperties"), Mapping):
            yield schema["additionalProperties"]

    def _target(self, schema: Mapping[str, Any]) -> Any:
        """What a local $ref points to, or None."""
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        node: Any = self._root
        for step in reference[1:].split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(node, Mapping):
                node = node.get(step)
            elif isinstance(node, list) and step.isdecimal() and int(step) < len(node):
                node = node[int(step)]
            else:
                return None
        return node

    def _kinds(self, schema: Any, depth: int) -> frozenset[str] | None:
        """Types that `schema` allows, None for any."""
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return None
        allowed: frozenset[str] | None = None
        if (target := self._target(schema)) is not None:
            allowed = self._kinds(target, depth + 1)
        declared = schema.get("type")
        if isinstance(declared, str):
            declared = [declared]
        if isinstance(declared, list):
            kinds = frozenset(kind for kind in declared if isinstance(kind, str)) & _KINDS
            if kinds and schema.get("nullable") is True:
                kinds |= {"null"}
            allowed = _both(allowed, kinds or None)
        values = schema.get("enum") if isinstance(schema.get("enum"), list) else None
        if "const" in schema:
            values = [schema["const"]]
        if values:
            allowed = _both(allowed, frozenset(map(kind_of, values)))
        for word in ("anyOf", "oneOf"):
            branches = [self._kinds(branch, depth + 1) for branch in _items(schema.get(word))]
            if branches and None not in branches:
                allowed = _both(allowed, frozenset().union(*(b for b in branches if b)))
        for branch in _items(schema.get("allOf")):
            allowed = _both(allowed, self._kinds(branch, depth + 1))
        if allowed is None and isinstance(schema.get("properties"), Mapping):
            return frozenset(("object",))
        if allowed is None and isinstance(schema.get("items"), Mapping):
            return frozenset(("array",))
        return allowed

    def _choices(self, schema: Any, depth: int) -> tuple[Any, ...] | None:
        """Values of enum and const, None if `schema` does not list its values."""
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return None
        if "const" in schema:
            return (schema["const"],)
        if isinstance(schema.get("enum"), list):
            return tuple(schema["enum"])
        if (target := self._target(schema)) is not None:
            return self._choices(target, depth + 1)
        for word in ("anyOf", "oneOf"):
            branches = [self._choices(branch, depth + 1) for branch in _items(schema.get(word))]
            if branches and None not in branches:
                return tuple(value for branch in branches for value in branch or ())
        return None


def _items(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def _both(left: frozenset[str] | None, right: frozenset[str] | None) -> frozenset[str] | None:
    """Types that two constraints both allow; the first wins if they contradict each other."""
    if left is None or right is None:
        return right if left is None else left
    common = left & right
    if "integer" in left | right and "number" in left | right:
        common |= {"integer"}
    return common or left
