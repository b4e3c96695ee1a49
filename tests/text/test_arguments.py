# SPDX-License-Identifier: Apache-2.0
"""Argument text becomes JSON of the schema's type, or stays text; it is never lost."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glmserve.text.tool_schema import Parameters, ToolSet

STRING = {"type": "string"}
INTEGER = {"type": "integer"}


def convert(schema: Any, text: str, **root: Any) -> Any:
    value_type = Parameters({"properties": {"x": schema}, **root}).value_type("x")
    assert not value_type.is_string, "a string streams and is never converted"
    return json.loads(value_type.to_json(text))


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("integer", "42", 42),
        ("integer", " -7\n", -7),
        ("integer", "3.0", 3),
        ("integer", "1e3", 1000),
        ("integer", '"42"', 42),
        ("integer", "007", 7),
        ("integer", "3.5", "3.5"),
        ("integer", "1_000", "1_000"),
        ("integer", "٣", "٣"),
        ("integer", "true", "true"),
        ("integer", "null", "null"),
        ("integer", "123456789012345678901234567890", 123456789012345678901234567890),
        ("integer", "1e999999", "1e999999"),
        ("integer", "1" * 5000, "1" * 5000),
        ("number", "1.50", 1.5),
        ("number", ".5", 0.5),
        ("number", "+2", 2),
        ("number", "-0", 0),
        ("number", '"2.5"', 2.5),
        ("number", "nan", "nan"),
        ("number", "-Infinity", "-Infinity"),
        ("number", "1e999", "1e999"),
        ("boolean", "True", True),
        ("boolean", "FALSE", False),
        ("boolean", "1", "1"),
        ("null", "null", None),
        ("null", "None", "None"),
        ("object", '{"a": 1}', {"a": 1}),
        ("object", '{\\"a\\": 1}', {"a": 1}),
        ("object", '"{\\"a\\": 1}"', {"a": 1}),
        ("object", "{'a': True, 'b': None}", {"a": True, "b": None}),
        ("object", "[1]", "[1]"),
        ("object", "{'a': {1}}", "{'a': {1}}"),
        ("object", "{'a': 1e999}", "{'a': 1e999}"),
        ("object", "{'a': '\\ud800'}", "{'a': '\\ud800'}"),
        ("object", "{" * 3000, "{" * 3000),
        ("array", "[1, 2]", [1, 2]),
        ("array", "(1, 'b')", [1, "b"]),
        ("array", "[" * 100000, "[" * 100000),
        ("array", "a, b", "a, b"),
    ],
)
def test_one_type(kind: str, text: str, value: Any) -> None:
    result = convert({"type": kind}, text)
    assert result == value
    assert type(result) is type(value)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({}, "5", 5),
        ({}, "five", "five"),
        ({}, "NaN", "NaN"),
        ({}, '{"a": [1]}', {"a": [1]}),
        (True, "true", True),
        ({"type": "nonsense"}, "5", 5),
        ({"type": 7}, "5", 5),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "text", "text"),
        ({"type": "string", "nullable": True}, "null", None),
        ({"type": ["string", "integer"]}, '"5"', '"5"'),
        ({"type": ["string", "integer", "number"]}, "5", 5),
        ({"type": ["string", "number"]}, "5.5", 5.5),
        ({"type": ["boolean", "string"]}, "TRUE", True),
        ({"anyOf": [STRING, INTEGER]}, "9", 9),
        ({"anyOf": [STRING, {}]}, "9", 9),
        ({"oneOf": [{"type": "array"}, {"type": "object"}]}, '{"a": 1}', {"a": 1}),
        ({"allOf": [{"type": ["integer", "string"]}, INTEGER]}, "9", 9),
        ({"allOf": [{"type": "number"}, INTEGER]}, "9", 9),
        ({"enum": [7, 8]}, "7", 7),
        ({"enum": ["7", 8]}, "7", "7"),
        ({"enum": ["7", 8]}, "8", 8),
        ({"enum": ["7", 8]}, "x", "x"),
        ({"const": True}, "true", True),
        ({"enum": ["a", None]}, "null", None),
        ({"properties": {"a": STRING}}, '{"a": "b"}', {"a": "b"}),
        ({"items": STRING}, '["b"]', ["b"]),
        ({"$ref": "#/$defs/N"}, "4", 4),
        ({"$ref": "#/$defs/M"}, "4", 4),
        ({"$ref": "#/$defs/L"}, "4", 4),
        ({"$ref": "#/$defs/none"}, "x", "x"),
        ({"$ref": "http://else/where"}, "4", 4),
        ({"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]}, "null", None),
    ],
)
def test_schemas(schema: Any, text: str, value: Any) -> None:
    definitions = {
        "N": INTEGER,
        "M": {"$ref": "#/$defs/N"},
        "L": {"anyOf": [{"$ref": "#/$defs/L"}, {"$ref": "#/$defs/N"}]},
    }
    result = convert(schema, text, **{"$defs": definitions})
    assert result == value
    assert type(result) is type(value)


@pytest.mark.parametrize(
    "schema",
    [
        STRING,
        {"enum": ["a", "b"]},
        {"const": "a"},
        {"anyOf": [STRING, {"enum": ["c"]}]},
        {"type": "string", "description": "x", "format": "date"},
        {"allOf": [{"type": ["string", "null"]}, STRING]},
        {"$ref": "#/$defs/S"},
    ],
)
def test_pure_strings_may_stream(schema: Any) -> None:
    parameters = Parameters({"properties": {"x": schema}, "$defs": {"S": STRING}})
    assert parameters.value_type("x").is_string


@pytest.mark.parametrize(
    "root",
    [
        {"$ref": "#/$defs/P", "$defs": {"P": {"properties": {"x": INTEGER}}}},
        {"allOf": [{"properties": {"y": STRING}}, {"properties": {"x": INTEGER}}]},
        {"anyOf": [{"properties": {"x": INTEGER}}, {"properties": {"y": STRING}}]},
        {"properties": {"y": STRING}, "additionalProperties": INTEGER},
    ],
)
def test_properties_are_found_through_the_root(root: Any) -> None:
    assert Parameters(root).value_type("x").to_json('"5"') == "5"


def test_undeclared_parameters_are_json_or_text() -> None:
    value_type = Parameters({"properties": {}}).value_type("x")
    assert [value_type.to_json(text) for text in ("1", "a b", '{"k": 1.0}')] == [
        "1",
        '"a b"',
        '{"k": 1.0}',
    ]


@pytest.mark.parametrize("schema", [None, 5, [], {"properties": 5}, {"properties": {"x": 5}}])
def test_nonsense_schemas_are_no_error(schema: Any) -> None:
    assert Parameters(schema).value_type("x").to_json("5") == "5"


def test_tools_by_name() -> None:
    tools = ToolSet([{"function": {"name": "a"}}, {"name": "b"}, {"function": 5}])
    assert tools.parameters("a") is not None
    assert tools.parameters("b") is not None
    assert tools.parameters("c") is None


_KINDS = st.sampled_from(["null", "integer", "number", "boolean", "object", "array", "string"])


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(
    kinds=st.lists(_KINDS, min_size=2, max_size=3, unique=True),
    text=st.one_of(
        st.text(max_size=12),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=3), st.lists, max_leaves=5
        ).map(json.dumps),
    ),
)
def test_the_result_is_always_json_that_can_be_sent(kinds: list[str], text: str) -> None:
    written = Parameters({"properties": {"x": {"type": kinds}}}).value_type("x").to_json(text)
    json.loads(written)
    written.encode()
