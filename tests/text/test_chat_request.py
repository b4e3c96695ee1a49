# SPDX-License-Identifier: Apache-2.0
"""Chat requests: what is accepted, how it is normalised, and errors that name the field."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest

from glmserve.errors import InvalidInput
from glmserve.text.chat_request import ChatRequest
from glmserve.text.normalize import normalize_messages
from glmserve.text.synthetic_tokenizer import template_source
from glmserve.text.template import ChatTemplate
from glmserve.text.template_traits import TemplateTraits

USER = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
DEEP: dict[str, Any] = {}
for _ in range(100):
    DEEP = {"properties": DEEP}
SORTING = TemplateTraits(True, False, True, False, True)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"messages": "{"}, "messages: not valid JSON"),
        ({"messages": b"\xff"}, "messages: not UTF-8"),
        ({"messages": "[" * 100000}, "messages: not valid JSON"),
        ({"messages": "[" * 200 + "]" * 200}, "messages: nested deeper"),
        ({"messages": USER, "tools": [{"function": {"name": "f", "parameters": DEEP}}]}, "tools: "),
        ({"messages": '[{"role": "user", "content": NaN}]'}, "messages: not valid JSON"),
        ({"messages": None}, "messages: "),
        ({"messages": ""}, "messages: "),
        ({"messages": []}, "messages: "),
        ({"messages": {"role": "user"}}, "messages: "),
        ({"messages": [5]}, "messages[0]: "),
        ({"messages": [{"content": "x"}]}, "messages[0].role: "),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content: "),
        (
            {"messages": [*USER, {"role": "user", "content": [{"type": "text", "text": 1}]}]},
            "messages[1].content[0].text: ",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]},
            "messages[0].tool_calls[0].function: ",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": ""}}]}]},
            "messages[0].tool_calls[0].function.name: ",
        ),
        ({"messages": USER, "tools": "5"}, "tools: must be a list"),
        ({"messages": USER, "tools": [{"type": "function"}]}, "tools[0].function: "),
        (
            {"messages": USER, "tools": [{"function": {"name": "a b"}}]},
            "tools[0].function.name: ",
        ),
        ({"messages": USER, "tools": [TOOL] * 129}, "tools: "),
        ({"messages": USER, "tool_choice": "required"}, "tool_choice: needs `tools`"),
        ({"messages": USER, "tool_choice": "always"}, "tool_choice: must be"),
        ({"messages": USER, "tools": [TOOL], "tool_choice": "5"}, "tool_choice: must be"),
        (
            {"messages": USER, "tools": [TOOL], "tool_choice": {"function": {"name": "g"}}},
            "tool_choice: names a tool",
        ),
        (
            {"messages": USER, "tools": [TOOL], "tool_choice": {"type": "x"}},
            "tool_choice: unknown type",
        ),
        ({"messages": USER, "reasoning_effort": "huge"}, "reasoning_effort: "),
        ({"messages": USER, "thinking": {"type": "maybe"}}, "thinking.type: "),
        ({"messages": USER, "chat_template_kwargs": "[]"}, "chat_template_kwargs: "),
        ({"messages": USER, "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs: "),
        ({"messages": USER, "parallel_tool_calls": "yes"}, "parallel_tool_calls: "),
    ],
)
def test_bad_input_names_its_field(inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(message)):
        ChatRequest.from_inputs(**inputs)


@pytest.mark.parametrize("arguments", ["[1]", "5", "{", '"x"', "[" * 100000, '{"a": Infinity}'])
def test_call_arguments_must_be_an_object(arguments: str) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    with pytest.raises(InvalidInput, match=r"messages\[0\].tool_calls\[0\].function.arguments: "):
        normalize_messages([{"role": "assistant", "tool_calls": [call]}])


@pytest.mark.parametrize("arguments", ["", "null", " ", None, "{}", {}])
def test_missing_arguments_are_an_empty_object(arguments: Any) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    (message,) = normalize_messages([{"role": "assistant", "tool_calls": [call]}])
    assert message["tool_calls"][0]["function"]["arguments"] == {}
    bare = {"function": {"name": "f"}}
    (message,) = normalize_messages([{"role": "assistant", "tool_calls": [bare]}])
    assert message["tool_calls"][0]["function"]["arguments"] == {}


def test_messages_are_normalised_on_copies() -> None:
    source = [
        {"role": "developer", "content": None, "name": None},
        {"role": "assistant", "reasoning": "r", "tool_calls": None},
        {"role": "assistant", "content": "c", "reasoning": "a", "reasoning_content": "b"},
        {"role": "tool", "content": {"t": 3}, "tool_call_id": 7},
        {"role": "user", "content": ["a", {"type": "input_text", "text": "b"}]},
    ]
    before = json.dumps(source)
    normal = normalize_messages(source)
    assert json.dumps(source) == before
    assert normal == [
        {"role": "system", "content": ""},
        {"role": "assistant", "content": "", "reasoning_content": "r"},
        {"role": "assistant", "content": "c", "reasoning_content": "b"},
        {"role": "tool", "content": '{"t": 3}', "tool_call_id": "7"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        },
    ]


def test_bare_functions_and_key_order_are_kept() -> None:
    chat = ChatRequest.from_inputs(
        messages=USER, tools='[{"name": "f", "z": 1, "a": 2, "type": "function"}]'
    )
    assert json.dumps(chat.tools) == (
        '[{"type": "function", "function": {"name": "f", "z": 1, "a": 2}}]'
    )


@pytest.mark.parametrize(
    ("given", "choice", "allowed"),
    [
        (None, "auto", None),
        ("", "auto", None),
        ("auto", "auto", None),
        (b"none", "none", None),
        ('"required"', "required", None),
        ({"type": "function", "function": {"name": "f"}}, "named:f", {"f"}),
        ('{"type": "function", "name": "f"}', "named:f", {"f"}),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TOOL]}},
            "required",
            {"f"},
        ),
    ],
)
def test_tool_choice(given: Any, choice: str, allowed: set[str] | None) -> None:
    chat = ChatRequest.from_inputs(messages=USER, tools=[TOOL], tool_choice=given)
    assert (chat.tool_choice, chat.callable_tools) == (choice, allowed)


def _turn(calls: list[str | None], results: list[str | None]) -> list[dict[str, Any]]:
    called = [{"function": {"name": "f"}} | ({} if one is None else {"id": one}) for one in calls]
    return [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": called},
        *(
            {"role": "tool", "content": f"<{one}{place}>"}
            | ({} if one is None else {"tool_call_id": one})
            for place, one in enumerate(results)
        ),
    ]


def test_sorting_in_code_equals_sorting_in_the_template() -> None:
    template = ChatTemplate(template_source())
    for calls in itertools.product(("a", "b", "A", None), repeat=2):
        for size in range(4):
            for results in itertools.product(("a", "b", None), repeat=size):
                turn = _turn(list(calls), list(results))
                plain = template.render(normalize_messages(turn))
                assert template.render(normalize_messages(turn, SORTING)) == plain


def test_results_are_sorted_turn_by_turn() -> None:
    turns = [*_turn(["a", "b"], ["b", "a"]), *_turn(["b", "c"], ["c", "b"])]
    contents = [m["content"] for m in normalize_messages(turns, SORTING) if m["role"] == "tool"]
    assert contents == ["<a1>", "<b0>", "<b1>", "<c0>"]


def test_templates_that_do_not_sort_get_results_as_sent() -> None:
    turn = _turn(["a", "b"], ["b", "a"])
    contents = [message["content"] for message in normalize_messages(turn)]
    assert contents[2:] == ["<b0>", "<a1>"]
