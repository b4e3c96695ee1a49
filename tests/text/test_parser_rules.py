# SPDX-License-Identifier: Apache-2.0
"""The parser's rules beyond the handed cases: malformed calls, cut output, white space, usage."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glmserve.text import markers
from glmserve.text.output import OutputProcessor
from glmserve.text.output_options import OutputOptions
from glmserve.text.tokenizer import Tokenizer
from tests.text.support import answer_of, chunkings, in_sizes, parse_ids, token_units, vocabulary

TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "search",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string"},
                    "limit": {"type": "integer"},
                    "note": {"type": ["string", "null"]},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
)
CONTENT = OutputOptions(start="content", tools=TOOLS)
REASONING = OutputOptions(start="reasoning", tools=TOOLS)
OPEN = "<tool_call>search<arg_key>query</arg_key><arg_value>"
CLOSE = "</arg_value></tool_call>"


def parse(text: str, options: OutputOptions = CONTENT, finish: str = "stop") -> dict[str, Any]:
    """The answer, the same for one token at a time, in threes and at once."""
    ids = token_units(text)
    answers = [parse_ids(options, in_sizes(ids, n), finish=finish) for n in (1, 3, len(ids) or 1)]
    assert answers[0] == answers[1] == answers[2]
    return answers[0]


def calls(text: str, options: OutputOptions = CONTENT, finish: str = "stop") -> list[Any]:
    return [
        (call["name"], call["arguments"]) for call in parse(text, options, finish)["tool_calls"]
    ]


@pytest.mark.parametrize(
    "text",
    [
        "Use <tool_call> to call.",
        "<tool_call>",
        "a<tool_call>two words</tool_call>",
        "<tool_call>näme</tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>" + "x" * 129 + "</tool_call>",
        "</arg_value> and </tool_call> and <arg_key>",
        "<tool_call>name\nmore</tool_call>",
    ],
)
def test_markup_without_a_call_is_text(text: str) -> None:
    answer = parse(text + " end")
    assert (answer["content"], answer["tool_calls"]) == (text + " end", [])


def test_an_unfinished_opening_in_reasoning_stays_reasoning() -> None:
    answer = parse("I could <tool_call> or not</think>No.", REASONING)
    assert answer["reasoning_content"] == "I could <tool_call> or not"
    assert answer["content"] == "No."


def test_an_opening_in_front_of_a_call_is_text() -> None:
    answer = parse("<tool_call><tool_call>now</tool_call>")
    assert answer["content"] == "<tool_call>"
    assert answer["tool_calls"] == [{"name": "now", "arguments": {}}]


def test_the_reasoning_end_behind_a_name_makes_it_text() -> None:
    answer = parse("<tool_call>now</think>Hi", REASONING)
    assert (answer["reasoning_content"], answer["content"]) == ("<tool_call>now", "Hi")


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\nsearch\n<arg_key>query</arg_key>\n<arg_value>x</arg_value>\n</tool_call>",
        "<tool_call> search <arg_key>query</arg_key><arg_value>x</arg_value></tool_call>",
        "<tool_call>search</arg_key><arg_key>query</arg_key><arg_value>x</arg_value></tool_call>",
        "<tool_call>search<arg_key>query<arg_value>x</arg_value></tool_call>",
        "<tool_call>search<arg_key>bad<arg_key>query</arg_key><arg_value>x</arg_value></tool_call>",
        "<tool_call>search<arg_key>query</arg_key> x</arg_value></tool_call>",
        "<tool_call>search<arg_key>query</arg_key><arg_value>x</arg_value>\\n\n \\n</tool_call>",
    ],
)
def test_sloppy_markup_is_understood(text: str) -> None:
    assert calls(text) == [("search", {"query": "x"})]


@pytest.mark.parametrize(
    "value",
    [
        "",
        " ",
        "\n x \n",
        "\\",
        "a\\n",
        "</arg_value>",
        "a</arg_value> b",
        "a</arg_value>\\",
        "<arg_key>k</arg_key><arg_value>v",
        "</tool_call>",
        "x</arg_value><tool_call>y</tool_call>",
        "&amp; \"q\" 'p' \u2028",
    ],
)
def test_values_are_raw(value: str) -> None:
    assert calls(OPEN + value + CLOSE) == [("search", {"query": value})]


def test_values_that_stream_go_out_at_once() -> None:
    processor = OutputProcessor(vocabulary(), CONTENT)
    opened = processor.push(token_units(OPEN))
    assert opened.tool_calls[0]["function"] == {"name": "search", "arguments": '{"query": "'}
    piece = processor.push(token_units('a"'))
    assert piece.tool_calls == ({"index": 0, "function": {"arguments": 'a\\"'}},)


@pytest.mark.parametrize("finish", ["stop", "length"])
@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (OPEN + "half", {"query": "half"}),
        (OPEN, {"query": ""}),
        (OPEN + "x</arg_value>", {"query": "x"}),
        (OPEN + "x</arg_value><arg_key>lim", {"query": "x"}),
        (OPEN + "x</arg_value><arg_key>limit</arg_key>", {"query": "x"}),
        (OPEN + "x</arg_value><arg_key>limit</arg_key><arg_value>1", {"query": "x"}),
        (OPEN + "x</arg_value><arg_key>note</arg_key><arg_value>abc", {"query": "x"}),
        ("<tool_call>search<arg_key>", {}),
    ],
)
def test_cut_calls_keep_what_is_complete(text: str, arguments: dict[str, Any], finish: str) -> None:
    answer = parse(text, finish=finish)
    assert answer["tool_calls"] == [{"name": "search", "arguments": arguments}]
    assert answer["finish_reason"] == ("tool_calls" if finish == "stop" else "length")


@pytest.mark.parametrize(
    ("text", "finish"),
    [
        ("<tool_call>", "length"),
        ("<tool_call>sea", "length"),
        ("<tool_call>search\n", "length"),
        ("<tool_call>\nsearch", "stop"),
    ],
)
def test_a_call_cut_in_its_name_is_not_delivered(text: str, finish: str) -> None:
    answer = parse("ok" + text, finish=finish)
    assert (answer["content"], answer["tool_calls"]) == ("ok", [])
    assert answer["finish_reason"] == finish


@pytest.mark.parametrize("text", ["say <tool_call>", "<tool_call>\n", "<tool_call> tags"])
def test_an_answer_may_end_with_a_mention_of_the_tag(text: str) -> None:
    assert parse(text)["content"] == text


def test_no_think_end_leaves_everything_in_reasoning() -> None:
    answer = parse("only thoughts ", REASONING)
    assert (answer["reasoning_content"], answer["content"]) == ("only thoughts ", "")


def test_white_space_of_content() -> None:
    call = "<tool_call>now</tool_call>"
    assert parse(" \n a b \n ")["content"] == "a b \n "
    assert parse(f"\n a \n{call}\n b \n{call}\n")["content"] == "ab"
    assert parse(f"{call}\n{call}\n")["content"] is None
    assert parse("  ")["content"] == ""
    assert parse(" r </think>\n\nHi\n", REASONING)["reasoning_content"] == " r "


def test_continued_text_keeps_its_leading_space() -> None:
    options = OutputOptions(start="content", mid_text=True)
    assert parse(" 42", options)["content"] == " 42"


def test_stray_think_end_is_dropped() -> None:
    assert parse("a</think>b")["content"] == "ab"


def test_tool_choice_none_removes_the_block() -> None:
    options = OutputOptions(start="content", tools=TOOLS, tool_choice="none")
    answer = parse(f"ok {OPEN}x{CLOSE} end", options)
    assert (answer["content"], answer["tool_calls"]) == ("okend", [])
    assert answer["finish_reason"] == "stop"


def test_named_tool_choice_finishes_with_stop() -> None:
    options = OutputOptions(start="content", tools=TOOLS, tool_choice="named:now")
    answer = parse("<tool_call>now</tool_call>", options)
    assert (len(answer["tool_calls"]), answer["finish_reason"]) == (1, "stop")


@pytest.mark.parametrize("reason", ["length", "abort", "error"])
def test_the_engines_reason_wins(reason: str) -> None:
    assert parse("<tool_call>now</tool_call>", finish=reason)["finish_reason"] == reason


def test_an_unknown_tool_is_dropped_and_leaves_an_empty_answer() -> None:
    answer = parse("<tool_call>nope<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>")
    assert (answer["content"], answer["tool_calls"]) == ("", [])
    assert answer["finish_reason"] == "stop"


def test_parsing_off_passes_everything_on() -> None:
    text = " <think>a</think>\n<tool_call>now</tool_call> "
    assert parse(text, OutputOptions())["content"] == text


@pytest.mark.parametrize(
    ("text", "options", "tokens"),
    [
        ("abc</think>de", REASONING, 3),
        ("abc", REASONING, 3),
        ("<think>ab</think>c", CONTENT, 3),
        ("ab<tool_call>now</tool_call>c", REASONING, 2),
        ("a<tool_call>b c</think>d", REASONING, 5),
        ("abc", CONTENT, 0),
        ("abc", OutputOptions(), 0),
    ],
)
def test_reasoning_tokens(text: str, options: OutputOptions, tokens: int) -> None:
    for size in (1, 2, 50):
        processor = OutputProcessor(vocabulary(), options)
        for group in in_sizes(token_units(text), size):
            processor.push(group)
        processor.push([], "stop")
        assert processor.reasoning_tokens == tokens


def test_text_that_spells_a_marker_is_text(tokenizer: Tokenizer) -> None:
    text = "a</think>b<tool_call>now</tool_call>"
    ids = tokenizer.encode(text, markers=False)
    answer = parse_ids(REASONING, in_sizes(ids, 1), tokenizer)
    assert answer["reasoning_content"] == text
    assert (answer["content"], answer["tool_calls"]) == ("", [])


def test_a_marker_ends_an_unfinished_character() -> None:
    ids = [0xE4, 0xBD, *token_units("</think>ok")]
    answer = parse_ids(REASONING, in_sizes(ids, 1))
    assert (answer["reasoning_content"], answer["content"]) == ("\ufffd", "ok")


def test_call_ids_are_unique() -> None:
    processor = OutputProcessor(vocabulary(), CONTENT)
    delta = processor.push(token_units("<tool_call>now</tool_call>" * 3), "stop")
    ids = [call["id"] for call in delta.tool_calls]
    assert len(set(ids)) == 3
    assert all(len(word) == 29 and word.startswith("call_") for word in ids)


_PLAIN = ("a", "\n", " ", "search", "now", "query", "limit", "12", "\\n", "\\", "é", "<")
_PIECES = st.sampled_from((*markers.OUTPUT_MARKERS, *_PLAIN))


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(data=st.data(), pieces=st.lists(_PIECES, max_size=25), start=st.booleans())
def test_any_soup_of_markup_parses_the_same_in_any_chunking(
    data: st.DataObject, pieces: list[str], start: bool
) -> None:
    options = REASONING if start else CONTENT
    ids = token_units("".join(pieces))
    whole = parse_ids(options, [ids])
    json.dumps(whole)
    assert parse_ids(options, in_sizes(ids, 1)) == whole
    assert parse_ids(options, data.draw(chunkings(ids))) == whole


def test_many_calls_in_one_push_are_ordered() -> None:
    processor = OutputProcessor(vocabulary(), CONTENT)
    text = "".join(f"{OPEN}{n}{CLOSE}" for n in range(20))
    answer = answer_of([processor.push(token_units(text), "stop")])
    assert [call["arguments"]["query"] for call in answer["tool_calls"]] == [
        str(n) for n in range(20)
    ]
