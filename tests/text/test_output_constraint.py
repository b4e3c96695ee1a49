# SPDX-License-Identifier: Apache-2.0
"""Every spelling of "the answer must look like this", and what is refused in each."""

from __future__ import annotations

import json
from typing import Any

import pytest

from glmserve.errors import InvalidInput
from glmserve.text.output_constraint import MAX_SOURCE, take_constraint

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
OBJECT = {"type": "object"}


@pytest.mark.parametrize(
    ("values", "kind", "value"),
    [
        ({"response_format": {"type": "json_object"}}, "json", OBJECT),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            "json",
            SCHEMA,
        ),
        (
            {"response_format": json.dumps({"type": "json_schema", "schema": SCHEMA})},
            "json",
            SCHEMA,
        ),
        ({"structured_outputs": {"json": SCHEMA}}, "json", SCHEMA),
        ({"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}}, "json", SCHEMA),
        ({"structured_outputs": {"json_object": True}}, "json", OBJECT),
        ({"structured_outputs": {"regex": "a+", "disable_fallback": False}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ("a", "b")),
        ({"structured_outputs": {"grammar": "root ::= 'a'"}}, "grammar", "root ::= 'a'"),
        ({"guided_decoding": {"json": True}}, "json", True),
        ({"guided_json": SCHEMA}, "json", SCHEMA),
        ({"guided_regex": "a"}, "regex", "a"),
        ({"guided_choice": '["a"]'}, "choice", ("a",)),
        ({"guided_grammar": "start: x"}, "grammar", "start: x"),
        ({"grammar": "start: x"}, "grammar", "start: x"),
        ({"guided_decoding_guide_type": "json"}, "json", OBJECT),
        (
            {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": "{}"},
            "json",
            {},
        ),
        ({"guided_decoding_guide_type": "regex", "guided_decoding_guide": "a"}, "regex", "a"),
        (
            {"guided_decoding_guide_type": "ebnf_grammar", "guided_decoding_guide": "start: x"},
            "grammar",
            "start: x",
        ),
    ],
)
def test_every_spelling_is_understood_and_taken_out(
    values: dict[str, Any], kind: str, value: Any
) -> None:
    given = {"temperature": 0.5, **values}
    constraint = take_constraint(given)
    assert constraint is not None
    assert (constraint.kind, constraint.value) == (kind, value)
    assert given == {"temperature": 0.5}


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"response_format": None},
        {"response_format": {"type": "text"}},
        {"structured_outputs": {}},
        {"structured_outputs": {"json": None, "json_object": False}},
        {"grammar_after": None},
    ],
)
def test_nothing_asked_is_no_constraint(values: dict[str, Any]) -> None:
    assert take_constraint(values) is None
    assert values == {}


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": []}, "response_format"),
        ({"response_format": "{"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
            "response_format.json_schema.schema",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {}, "strict": 1.5},
                }
            },
            "response_format.json_schema.strict",
        ),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json_object": 1.5}}, "structured_outputs.json_object"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"guided_regex": "a" * (MAX_SOURCE + 1)}, "guided_regex"),
        ({"guided_json": "nope"}, "guided_json"),
        ({"guided_json": {"enum": ["x" * MAX_SOURCE]}}, "guided_json"),
        ({"guided_decoding_guide": "a"}, "guided_decoding_guide"),
        ({"guided_decoding_guide_type": "regex"}, "guided_decoding_guide"),
        ({"guided_decoding_guide_type": "structural_tag"}, "guided_decoding_guide_type"),
        ({"guided_json": {}, "response_format": {"type": "json_object"}}, "guided_json"),
        ({"grammar_after": 3}, "grammar_after"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_its_name(values: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as error:
        take_constraint(values)
    assert error.value.field == field


def test_a_schema_that_is_nested_too_deep_is_refused() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(500):
        schema = {"type": "array", "items": schema}
    with pytest.raises(InvalidInput, match="guided_json: nested deeper"):
        take_constraint({"guided_json": schema})


def test_white_space_and_strictness_are_kept() -> None:
    compact = take_constraint({"structured_outputs": {"json": {}, "disable_any_whitespace": True}})
    assert compact is not None and compact.whitespace == ""
    own = take_constraint({"structured_outputs": {"json": {}, "whitespace_pattern": " ?"}})
    assert own is not None and own.whitespace == " ?"
    schema = {"schema": {}, "strict": False}
    loose = take_constraint({"response_format": {"type": "json_schema", "json_schema": schema}})
    assert loose is not None and not loose.strict
