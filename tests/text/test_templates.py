# SPDX-License-Identifier: Apache-2.0
"""Every handed template case renders to its text, with templates written for these tests.

GLM-5.3 is the template of synthetic checkpoints; 5.2, 5.3-Flash, 4.7 and 4.6 lie beside this file.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from glmserve.errors import CheckpointError, InvalidInput
from glmserve.text.chat_request import ChatRequest
from glmserve.text.normalize import normalize_messages
from glmserve.text.prompt import Renderer
from glmserve.text.synthetic_tokenizer import template_source
from glmserve.text.template import ChatTemplate, TemplateFailure, TemplateSource
from tests.text.support import TESTS, Case, case_id, cases

CASES = cases("template")
NAMES = ("glm-5.3", "glm-5.3-flash", "glm-5.2", "glm-4.7", "glm-4.6")


@functools.cache
def source(name: str) -> str:
    if name == "glm-5.3":
        return template_source()
    return (TESTS / "templates" / f"{name}.jinja").read_text("utf-8")


@functools.cache
def renderer(name: str) -> Renderer:
    return Renderer(TemplateSource(source(name)), worker=False)


def render(name: str, chat: ChatRequest) -> str:
    template = renderer(name)
    return template.render(chat, normalize_messages(chat.messages, template.traits), {})


def user(content: Any = "Hi", **more: Any) -> ChatRequest:
    return ChatRequest.from_inputs(messages=[{"role": "user", "content": content}], **more)


def test_all_handed_cases_are_covered() -> None:
    assert len(CASES) == 37
    assert {case["template"] for case in CASES} == set(NAMES)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_handed_case(case: Case) -> None:
    chat = ChatRequest.from_inputs(
        messages=json.dumps(case["messages"]),
        tools=json.dumps(case["tools"]),
        chat_template_kwargs=json.dumps(case["kwargs"]),
    )
    assert render(case["template"], chat) == case["expect_text"]
    if "raw_text" in case:
        bare = ChatTemplate(source(case["template"]))
        text = bare.render(case["messages"], case["tools"], variables=case["kwargs"])
        assert text == case["raw_text"]


@pytest.mark.parametrize("name", NAMES)
def test_rendering_equals_transformers(name: str) -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "q <b> é"}]},
        {
            "role": "assistant",
            "content": "<think>why</think> ok ",
            "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": {"k": [1, "é"]}}}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "r"},
        {"role": "user", "content": "next"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"é": {}}}}]
    (theirs,), _ = render_jinja_template(
        [messages], tools=tools, chat_template=source(name), add_generation_prompt=True
    )
    assert ChatTemplate(source(name)).render(messages, tools) == theirs


def test_traits_are_found_by_asking() -> None:
    assert [name for name in NAMES if renderer(name).traits.sorts_results] == [
        "glm-5.3",
        "glm-5.3-flash",
    ]
    assert [name for name in NAMES if not renderer(name).traits.has_off_switch] == [
        "glm-5.3",
        "glm-5.3-flash",
    ]


@pytest.mark.parametrize(
    ("name", "effort", "end"),
    [
        ("glm-5.3", "none", "Low<|user|>Hi<|assistant|><think>"),
        ("glm-5.3", "minimal", "Low<|user|>Hi<|assistant|><think>"),
        ("glm-5.3", "low", "Low<|user|>Hi<|assistant|><think>"),
        ("glm-5.3", "medium", "High<|user|>Hi<|assistant|><think>"),
        ("glm-5.3", "high", "High<|user|>Hi<|assistant|><think>"),
        ("glm-5.3", "xhigh", "Max<|user|>Hi<|assistant|><think>"),
        ("glm-5.3", "max", "Max<|user|>Hi<|assistant|><think>"),
        ("glm-5.2", "none", "<sop><|user|>Hi<|assistant|><think></think>"),
        ("glm-5.2", "low", "High<|user|>Hi<|assistant|><think>"),
        ("glm-5.2", "medium", "High<|user|>Hi<|assistant|><think>"),
        ("glm-5.2", "max", "Max<|user|>Hi<|assistant|><think>"),
        ("glm-4.7", "none", "<sop><|user|>Hi<|assistant|></think>"),
        ("glm-4.6", "none", "Hi/nothink<|assistant|>\n<think></think>"),
    ],
)
def test_top_level_effort_is_mapped(name: str, effort: str, end: str) -> None:
    assert render(name, user(reasoning_effort=effort)).endswith(end)


def test_template_kwargs_are_verbatim_and_win() -> None:
    chat = user(reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "medium"})
    assert "Effort: Max" in render("glm-5.3", chat)
    chat = user(thinking={"type": "disabled"}, chat_template_kwargs={"enable_thinking": True})
    assert render("glm-5.2", chat).endswith("<think>")


def test_thinking_block() -> None:
    assert render("glm-5.2", user(thinking={"type": "disabled"})).endswith("</think>")
    history = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning": "r"},
        {"role": "user", "content": "c"},
    ]
    for name, clear, shown in (
        ("glm-5.3", None, True),
        ("glm-5.3", True, False),
        ("glm-5.2", None, False),
        ("glm-5.2", False, True),
    ):
        chat = ChatRequest.from_inputs(messages=history, thinking={"clear_thinking": clear})
        assert ("<think>r</think>" in render(name, chat)) == shown


@pytest.mark.parametrize(
    ("content", "tail"),
    [
        ("The answer is", "<|assistant|><think></think>The answer is"),
        ("<think>plan</think>So ", "<|assistant|><think>plan</think>So "),
        ("", "<|assistant|><think></think>"),
        ([{"type": "text", "text": "x"}], "<|assistant|><think></think>x"),
    ],
)
def test_continued_message_stays_open(content: Any, tail: str) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": content}]
    chat = ChatRequest.from_inputs(messages=messages, continue_final_message=True)
    assert render("glm-5.3", chat).endswith("<|user|>q" + tail)


def test_only_an_assistants_message_can_be_continued() -> None:
    with pytest.raises(InvalidInput, match="continue_final_message"):
        render("glm-5.3", user(continue_final_message=True))


def test_without_a_generation_prompt() -> None:
    assert render("glm-5.3", user(add_generation_prompt=False)).endswith("<|user|>Hi")


@pytest.mark.parametrize(
    "hostile",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ dict.__class__ }}",
        "{{ messages.append(1) }}",
        "{% set n = namespace(_x=1) %}",
        "{% set n = namespace() %}{% set n._x = 1 %}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ raise_exception('no') }}",
        "{{ 1 / 0 }}",
        "{{ messages[99].role.x }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
def test_templates_cannot_reach_out(hostile: str) -> None:
    template = ChatTemplate(hostile)
    try:
        text = template.render([{"role": "user", "content": "x"}])
    except TemplateFailure:
        return
    assert text == "", "an unsafe attribute is undefined and prints nothing"


def test_a_broken_template_is_refused_at_start() -> None:
    with pytest.raises(CheckpointError, match="does not compile"):
        ChatTemplate("{% if %}")


def test_generation_blocks_and_loop_controls_are_understood() -> None:
    text = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}"
    template = ChatTemplate(text + "{% endfor %}")
    assert template.render([{"content": "a"}, {"content": "b"}]) == "a"


def test_output_entries_give_a_response_each() -> None:
    chat = ChatRequest.from_inputs(
        messages=[
            {"role": "user", "content": "q"},
            {"role": "tool", "content": [{"output": "a"}, {"output": "b"}]},
        ]
    )
    for name in ("glm-5.3", "glm-5.2", "glm-4.7"):
        expected = "<tool_response>a</tool_response><tool_response>b</tool_response>"
        assert expected in render(name, chat)
