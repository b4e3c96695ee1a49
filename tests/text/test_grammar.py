# SPDX-License-Identifier: Apache-2.0
"""Grammars from constraints and tools: what they let through, and which requests are refused."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from glmserve.errors import InvalidInput
from glmserve.text.grammar import Grammar, GrammarBuilder
from glmserve.text.grammar_vocabulary import grammar_vocabulary
from glmserve.text.output import OutputProcessor
from glmserve.text.output_constraint import take_constraint
from glmserve.text.output_options import OutputOptions
from glmserve.text.parse_text import ParsedAnswer
from glmserve.text.tokenizer import Tokenizer
from tests.text.random_schemas import random_schema

CALL = "<tool_call>{}</tool_call>"
PAIR = "<arg_key>{}</arg_key><arg_value>{}</arg_value>"


class Checker:
    """Builds grammars for the synthetic tokenizer and tries texts on them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.builder = GrammarBuilder(tokenizer)
        self.vocabulary: LLTokenizer = grammar_vocabulary(tokenizer).tokenizer

    def build(self, values: dict[str, Any] | None = None, **options: Any) -> Grammar | None:
        settings = OutputOptions(**{"start": "content", **options})
        return self.builder.build(take_constraint(dict(values or {})), settings)

    def accepts(self, grammar: Grammar | None, text: str) -> bool:
        assert grammar is not None
        matcher = LLMatcher(self.vocabulary, grammar.text, log_level=0)
        ids = self.tokenizer.encode(text).tolist()
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    def write(self, grammar: Grammar, seed: int) -> list[int]:
        """A random answer of the grammar, its end-of-answer id included; short if it can be."""
        generator = random.Random(seed)
        matcher = LLMatcher(self.vocabulary, grammar.text, log_level=0)
        ids: list[int] = []
        while True:
            mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            (allowed,) = np.unpackbits(mask, bitorder="little").nonzero()
            assert len(allowed) and allowed[-1] < self.tokenizer.vocab_size
            ends = [token for token in self.tokenizer.eos_token_ids if token in allowed]
            ids.append(ends[0] if ends and len(ids) > 60 else int(generator.choice(allowed)))
            if ids[-1] in self.tokenizer.eos_token_ids:
                return ids
            assert matcher.consume_token(ids[-1]), matcher.get_error()
            assert len(ids) < 2000


@pytest.fixture(scope="module")
def checker(tokenizer: Tokenizer) -> Checker:
    return Checker(tokenizer)


def tool(name: str, parameters: Any = None, strict: bool | None = None) -> dict[str, Any]:
    function = {"name": name, "parameters": parameters}
    if strict is not None:
        function["strict"] = strict
    return {"type": "function", "function": function}


def pairs(**values: str) -> str:
    return "".join(PAIR.format(key, value) for key, value in values.items())


@pytest.mark.parametrize(
    ("values", "good", "bad"),
    [
        ({"guided_regex": r"a/\d{2}"}, ["a/12"], ["a/1", "a/123", "b"]),
        ({"guided_choice": ["a", 'é "\n'], "guided_json": None}, ["a", 'é "\n'], ["", "aa"]),
        ({"guided_grammar": 'start: "x" B\nB: /b+/'}, ["xbb"], ["x", "xc"]),
        ({"guided_grammar": 'root ::= "x" b\nb ::= [0-9]+ | "y"'}, ["x12", "xy"], ["x", "xz"]),
        ({"response_format": {"type": "json_object"}}, ['{"a": [1, {}]}', "{}"], ["[]", "1", ""]),
        ({"guided_json": True}, ["[1]", '"a"'], ["x"]),
        ({"guided_json": {"type": "integer"}}, ["-12", "0", "9" * 18], ["1.5", "01", "9" * 19]),
        ({"guided_json": {"type": "integer", "minimum": 3}}, ["3", "999"], ["2", "-3"]),
        ({"guided_json": {"type": "integer", "maximum": 3}}, ["3", "-999"], ["4"]),
        ({"guided_json": {"type": "integer", "enum": [3, 5]}}, ["3", "5"], ["4"]),
        ({"guided_json": {"type": "string", "maxLength": 2}}, ['"ab"', '"é"', '""'], ['"abc"']),
    ],
)
def test_answers_that_a_grammar_lets_through(
    checker: Checker, values: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    grammar = checker.build(values)
    assert [text for text in good if not checker.accepts(grammar, text)] == []
    assert [text for text in bad if checker.accepts(grammar, text)] == []


def test_objects_are_closed_and_white_space_is_bounded(checker: Checker) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}}
    grammar = checker.build({"guided_json": schema})
    for good in ('{"a": 1, "b": [2]}', '{"b":1}', "{}", '{\n  "a": 1\n}'):
        assert checker.accepts(grammar, good)
    for bad in ('{"c": 1}', '{"a":' + "\n\n" + "1}", "{" + 40 * " " + "}"):
        assert not checker.accepts(grammar, bad)
    opened = {**schema, "additionalProperties": {"type": "boolean"}}
    assert checker.accepts(checker.build({"guided_json": opened}), '{"a": 1, "c": true}')
    compact = {"structured_outputs": {"json": schema, "disable_any_whitespace": True}}
    assert checker.accepts(checker.build(compact), '{"a":1}')
    assert not checker.accepts(checker.build(compact), '{"a": 1}')


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"type": "object", "properties": {"a": {}}}, {"properties": {"b": {}}}]},
        {"properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}, "required": ["b"]}, {}]},
    ],
)
def test_objects_put_together_from_several_schemas_stay_open(
    checker: Checker, schema: dict[str, Any]
) -> None:
    assert checker.accepts(checker.build({"guided_json": schema}), '{"a": 1, "b": 2}')


def test_keywords_beyond_the_grammar_are_refused_unless_strict_is_off(checker: Checker) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}

    def asked(**more: Any) -> dict[str, Any]:
        holder = {"schema": schema, **more}
        return {"response_format": {"type": "json_schema", "json_schema": holder}}

    assert checker.accepts(checker.build(asked(strict=False)), "[1, 1]")
    for more in ({}, {"strict": True}):
        with pytest.raises(InvalidInput, match="uniqueItems") as error:
            checker.build(asked(**more))
        assert error.value.field == "response_format.json_schema.schema"


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"guided_json": {"type": "text"}}, "Invalid type"),
        ({"guided_json": {"properties": 3}}, "must be an object"),
        ({"guided_json": {"$ref": "#/$defs/none"}}, "does not exist"),
        ({"guided_json": {"$ref": "https://example.org/x"}}, "retriev"),
        ({"guided_json": {"$ref": "#"}}, "nothing matches"),
        ({"guided_json": {"minimum": 3, "maximum": 2, "type": "integer"}}, "Unsatisfiable"),
        ({"guided_json": False}, "Unsatisfiable"),
        ({"guided_json": {"type": "string", "pattern": "(?=a)b"}}, "look-around"),
        ({"guided_json": {"x-guidance": {"lenient": True}, "not": {}}}, "not"),
        ({"guided_regex": "("}, "unclosed"),
        ({"guided_regex": r"[^\s\S]"}, "nothing matches"),
        ({"guided_grammar": "start: nothing"}, "unknown name"),
        ({"guided_grammar": 'start: a\na: a "x"'}, "nothing matches"),
        ({"guided_grammar": "root ::= ("}, "not a grammar"),
        ({"guided_grammar": "hello there"}, "not a grammar"),
    ],
)
def test_bad_schemas_and_grammars_are_refused_by_name(
    checker: Checker, values: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidInput, match=reason) as error:
        checker.build(values)
    assert error.value.field == next(iter(values))
    assert "\n" not in error.value.reason and len(error.value.reason) < 500


@pytest.mark.parametrize("start", ["reasoning", "content", "off", "auto"])
def test_a_grammar_waits_for_the_end_of_open_thinking_only(checker: Checker, start: str) -> None:
    grammar = checker.build({"guided_regex": "a"}, start=start)
    assert grammar is not None
    end = checker.tokenizer.marker_id("</think>")
    assert grammar.after == (end if start == "reasoning" else None)


WEATHER = tool(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 8, "pattern": "^[A-Z][a-zé]+$|^x$"},
            "days": {"type": "integer", "minimum": 1},
            "unit": {"enum": ["c", "größe", None, 3]},
            "place": {"$ref": "#/$defs/place"},
            "note": {"type": ["string", "null"]},
            "tag": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "boolean"}]},
        },
        "required": ["city", "days"],
        "$defs": {
            "place": {"type": "object", "properties": {"at": {"$ref": "#/$defs/at"}}},
            "at": {"type": "array", "items": {"type": "number"}, "maxItems": 2},
        },
    },
)
NOW = tool("now")
OSLO = "get_weather" + pairs(city="Oslo", days="3")


def test_calls_follow_the_tools_schema(checker: Checker) -> None:
    grammar = checker.build(tools=(WEATHER, NOW), tool_choice="required")
    full = pairs(unit="größe", place='{"at": [1, 2.5]}', note='any "text" </', tag="abc")
    for body in (OSLO, OSLO + full, OSLO + pairs(unit="null", tag="true"), "now"):
        assert checker.accepts(grammar, CALL.format(body)), body
    for body in (
        "get_weather" + pairs(city="Oslo"),  # days is required
        "get_weather" + pairs(days="3", city="Oslo"),
        "get_weather" + pairs(city="oslo", days="3"),
        "get_weather" + pairs(city="Trondheimen", days="3"),
        "get_weather" + pairs(city="Oslo", days='"3"'),
        "get_weather" + pairs(city="Oslo", days="0"),
        OSLO + pairs(unit="f"),
        OSLO + pairs(place="{'at': []}"),
        OSLO + pairs(tag="abcd"),
        OSLO + pairs(other="x"),
        "other",
        "now" + pairs(a="1"),
    ):
        assert not checker.accepts(grammar, CALL.format(body)), body


def test_tool_choice_decides_how_many_calls_and_which(checker: Checker) -> None:
    call, now = CALL.format(OSLO), CALL.format("now")
    tools = (WEATHER, NOW)
    required = checker.build(tools=tools, tool_choice="required")
    one = checker.build(tools=tools, tool_choice="required", parallel_tool_calls=False)
    named = checker.build(tools=(NOW,), tool_choice="named:now")
    for grammar, good, bad in (
        (required, [call, now + call + now], ["", "text", "text" + call, call + "text"]),
        (one, [call, now], ["", call + now]),
        (named, [now], ["", call, now + now]),
    ):
        assert [text for text in good if not checker.accepts(grammar, text)] == []
        assert [text for text in bad if checker.accepts(grammar, text)] == []
    assert checker.build(tools=tools) is None
    assert checker.build(tools=tools, tool_choice="none") is None


def test_a_form_and_tools_together_leave_the_model_the_choice(checker: Checker) -> None:
    schema = {"guided_json": {"type": "array", "items": {"type": "integer"}}}
    call = CALL.format(OSLO)
    both = checker.build(schema, tools=(WEATHER,))
    for text in ("[1]", call, call + call):
        assert checker.accepts(both, text)
    assert not checker.accepts(both, "[1]" + call)
    assert not checker.accepts(checker.build(schema, tools=(WEATHER,), tool_choice="none"), call)
    must = checker.build(schema, tools=(WEATHER,), tool_choice="required")
    assert checker.accepts(must, call) and not checker.accepts(must, "[1]")


@pytest.mark.parametrize("many", [True, False])
def test_strict_tools_bind_calls_and_leave_text_free(checker: Checker, many: bool) -> None:
    strict = tool("add", {"properties": {"n": {"type": "integer"}}, "required": ["n"]}, True)
    grammar = checker.build(tools=(strict, NOW), parallel_tool_calls=many)
    call, now = CALL.format("add" + pairs(n="1")), CALL.format("now")
    for text in ("", "Hello\nthere", call, "Well: " + call, "<think>hm</think>so" + now):
        assert checker.accepts(grammar, text), text
    assert checker.accepts(grammar, call + "\n" + now) is many
    for text in (CALL.format("add"), "x" + CALL.format("add" + pairs(n="a")), "<arg_key>"):
        assert not checker.accepts(grammar, text), text


def test_extra_arguments_only_where_the_schema_asks_for_them(checker: Checker) -> None:
    extra = tool("f", {"type": "object", "additionalProperties": True})
    body = CALL.format("f" + pairs(anything="goes", too="{}"))
    for given, allowed in ((extra, True), (tool("f", {"type": "object"}), False)):
        grammar = checker.build(tools=(given,), tool_choice="required")
        assert checker.accepts(grammar, body) is allowed
        assert checker.accepts(grammar, CALL.format("f"))


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ("b+", ["abba", "b"], ["", "aca"]),
        ("^b+", ["bb", "ba"], ["ab"]),
        ("b$", ["ab"], ["ba"]),
        ("^(a|b)$", ["a", "b"], ["ab", ""]),
        ("^a|b$", ["ac", "cb"], ["ca"]),
        (r"^a\|[|)]\$", ["a||$", "a|)$x"], ["a", "a|"]),
        (r"^\d/$", ["1/"], ["/"]),
    ],
)
def test_patterns_of_string_arguments_search_as_json_schema_says(
    checker: Checker, pattern: str, good: list[str], bad: list[str]
) -> None:
    parameters = {"properties": {"s": {"type": "string", "pattern": pattern}}, "required": ["s"]}
    grammar = checker.build(tools=(tool("f", parameters),), tool_choice="required")
    for text in (*good, *bad):
        call = CALL.format("f" + pairs(s=text))
        assert checker.accepts(grammar, call) is (text in good), text


@pytest.mark.parametrize(
    ("parameters", "field", "reason"),
    [
        ({"properties": {"a": {"type": "text"}}}, "", "Invalid type"),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}}, " $ref", "points nowhere"),
        ({"properties": {"a": {"type": "string", "pattern": "(?=a)"}}}, "", "look-around"),
        ({"properties": {"a": {"type": "string", "maxLength": "3"}}}, " maxLength", "count"),
    ],
)
def test_a_bad_tool_is_refused_by_its_name(
    checker: Checker, parameters: dict[str, Any], field: str, reason: str
) -> None:
    with pytest.raises(InvalidInput, match=reason) as error:
        checker.build(tools=(NOW, tool("broken", parameters)), tool_choice="required")
    assert error.value.field == 'tools["broken"].function.parameters' + field


def test_strict_tools_refuse_what_others_only_ignore(checker: Checker) -> None:
    parameters = {"properties": {"a": {"type": "array", "uniqueItems": True}}}
    assert checker.build(tools=(tool("f", parameters),), tool_choice="required")
    with pytest.raises(InvalidInput, match="uniqueItems"):
        checker.build(tools=(tool("f", parameters, strict=True),))


def test_random_calls_parse_back_to_what_the_schema_says(checker: Checker) -> None:
    options = OutputOptions(start="content", tools=(WEATHER, NOW), tool_choice="required")
    grammar = checker.builder.build(None, options)
    assert grammar is not None
    seen = set()
    for seed in range(25):
        ids = checker.write(grammar, seed)
        answer = ParsedAnswer()
        processor = OutputProcessor(checker.tokenizer, options)
        for token in ids[:-1]:
            answer.add(processor.push([token]))
        answer.add(processor.push(ids[-1:], "stop"))
        calls = answer.as_dict()["tool_calls"]
        assert calls and answer.as_dict()["content"] is None
        for call in calls:
            seen.add(call["name"])
            if call["name"] == "get_weather":
                jsonschema.validate(call["arguments"], WEATHER["function"]["parameters"])
    assert seen == {"get_weather", "now"}


def test_random_answers_satisfy_random_schemas(checker: Checker) -> None:
    for seed in range(40):
        schema = random_schema(seed)
        grammar = checker.build({"guided_json": schema})
        assert grammar is not None
        text = checker.tokenizer.decode(checker.write(grammar, seed))
        jsonschema.validate(json.loads(text), schema)
