# SPDX-License-Identifier: Apache-2.0
"""Structured output and forced tool calls through the real server, engine and MTP drafts."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from tests.server.harness import Server

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "marks": {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": 3},
    },
    "required": ["name", "marks"],
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}
MESSAGES = json.dumps([{"role": "user", "content": "Who?"}])
SAMPLED = {"temperature": 1.0, "seed": 7, "max_tokens": 600}


def _end_thinking(token: int) -> str:
    """Sampling parameters that make random weights stop thinking soon."""
    return json.dumps({"logit_bias": {str(token): 4.0}})


def test_a_schema_is_followed_in_a_stream(drafting: Server) -> None:
    sampling = json.dumps({"response_format": FORMAT})
    streamed = drafting.grpc_stream(
        text_input="Say:", stream=True, sampling_parameters=sampling, **SAMPLED
    )
    assert (streamed.finish_reason, streamed.finals) == ("stop", 1)
    jsonschema.validate(json.loads(streamed.text), SCHEMA)
    form = json.dumps(FORMAT)
    status, body = drafting.generate(text_input="Say:", response_format=form, **SAMPLED)
    assert status == 200 and body["text_output"] == streamed.text


def test_thinking_comes_before_the_form_and_before_a_call(drafting: Server, tokenizer: Any) -> None:
    end = tokenizer.marker_id("</think>")
    asked = {"messages": MESSAGES, "sampling_parameters": _end_thinking(end), **SAMPLED}
    status, body = drafting.generate(response_format=json.dumps(FORMAT), **asked)
    assert status == 200 and body["finish_reason"] == "stop", body
    assert body["reasoning_content"]
    jsonschema.validate(json.loads(body["text_output"]), SCHEMA)
    status, body = drafting.generate(tools=json.dumps([TOOL]), tool_choice="required", **asked)
    assert status == 200 and body["finish_reason"] == "tool_calls", body
    assert body["reasoning_content"] and not body["text_output"]
    arguments: dict[int, str] = {}
    for delta in json.loads(body["tool_calls"]):
        arguments.setdefault(delta["index"], "")
        arguments[delta["index"]] += delta["function"]["arguments"]
    assert arguments
    for text in arguments.values():
        jsonschema.validate(json.loads(text), SCHEMA)


def test_tensorrt_llms_guides_are_followed(drafting: Server) -> None:
    status, body = drafting.generate(
        text_input="Say:",
        guided_decoding_guide_type="regex",
        guided_decoding_guide="(yes|no), [0-9]{2}",
        **SAMPLED,
    )
    assert status == 200 and body["finish_reason"] == "stop"
    assert body["text_output"][:-4] in ("yes", "no")


def test_a_stop_string_cuts_what_a_grammar_writes(drafting: Server) -> None:
    status, body = drafting.generate(
        text_input="Say:",
        guided_decoding_guide_type="regex",
        guided_decoding_guide="a{3}b{400}",
        stop_words=["bbb"],
        **SAMPLED,
    )
    assert status == 200 and body["text_output"] == "aaa"
    assert (body["finish_reason"], json.loads(body["stop_reason"])) == ("stop", "bbb")


@pytest.mark.parametrize(
    ("tensors", "field"),
    [
        ({"response_format": '{"type": "xml"}'}, "response_format.type"),
        (
            {"sampling_parameters": '{"structured_outputs": {"json": {"type": "x"}}}'},
            "structured_outputs.json",
        ),
        (
            {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "("},
            "guided_decoding_guide",
        ),
    ],
)
def test_a_bad_schema_is_refused(drafting: Server, tensors: dict[str, str], field: str) -> None:
    status, body = drafting.generate(text_input="Say:", **tensors)
    assert status == 400
    assert body["error"].startswith(f"{field}: ") or f" {field}: " in body["error"]
    assert drafting.status()["running"] == 0
