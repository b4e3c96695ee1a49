# SPDX-License-Identifier: Apache-2.0
"""Bad input is answered while others run, with an error that names the field, and harms nobody."""

from __future__ import annotations

from typing import Any

import pytest

from glmserve.text.tokenizer import Tokenizer
from tests.server.harness import BackgroundStreams, Server, wait_until
from tests.server.scripted_engine import Act, answer

# name -> (request to the ensemble, what the error must say)
BAD: dict[str, tuple[dict[str, Any], list[str]]] = {
    "nothing": ({"stream": False}, ["text_input", "messages"]),
    "empty prompt": ({"text_input": ""}, ["text_input", "empty"]),
    "both prompts": ({"text_input": "x", "messages": "[]"}, ["text_input", "messages"]),
    "tools without messages": ({"text_input": "x", "tools": "[]"}, ["tools", "messages"]),
    "prompt too long": (
        {"text_input": "word " * 70000},
        ["prompt: the prompt has ", "the context holds CONTEXT"],
    ),
    "max_tokens 0": ({"text_input": "x", "max_tokens": 0}, ["max_tokens", "0"]),
    "max_tokens too large": ({"text_input": "x", "max_tokens": 1 << 30}, ["max_tokens", "CONTEXT"]),
    "temperature below 0": ({"text_input": "x", "temperature": -0.5}, ["temperature", "-0.5"]),
    "top_p 0": ({"text_input": "x", "top_p": 0.0}, ["top_p", "0.0"]),
    "top_p above 1": ({"text_input": "x", "top_p": 1.5}, ["top_p", "1.5"]),
    "messages not JSON": ({"messages": "[{"}, ["messages", "JSON"]),
    "messages not a list": ({"messages": "3"}, ["messages"]),
    "sampling not JSON": (
        {"text_input": "x", "sampling_parameters": "{nope"},
        ["sampling_parameters", "JSON"],
    ),
    "sampling not an object": (
        {"text_input": "x", "sampling_parameters": "[1]"},
        ["sampling_parameters", "object"],
    ),
    "unknown sampling key": (
        {"text_input": "x", "sampling_parameters": '{"temprature": 1}'},
        ["temprature", "unknown"],
    ),
    "unknown parameter": ({"text_input": "x", "parameters": {"temprature": 1}}, ["temprature"]),
    "empty stop string": ({"text_input": "x", "stop_words": ["a", ""]}, ["stop"]),
    "unsupported setting": ({"text_input": "x", "beam_width": 4}, ["beam_width"]),
    "echo of a stream": (
        {"text_input": "x", "stream": True, "exclude_input_in_output": False},
        ["exclude_input_in_output"],
    ),
}


def _one_by_one(server: Server, context: int) -> None:
    for name, (request, said) in BAD.items():
        got = server.generate_stream(**{"stream": False, **request})
        assert got.responses == [], name
        for word in said:
            assert word.replace("CONTEXT", str(context)) in got.error, (name, got.error)


@pytest.fixture(scope="module")
def context(scripted: Server) -> int:
    """Tokens of the context, as the server itself says."""
    _, body = scripted.generate(text_input="x", max_tokens=1 << 30)
    return int(body["error"].partition("context of ")[2].partition(" ")[0])


def test_bad_input_names_the_field_while_streams_run_unharmed(
    scripted: Server, tokenizer: Tokenizer, context: int
) -> None:
    prompts = [f"stream {i} goes on: " for i in range(16)]
    streams = BackgroundStreams(
        scripted,
        [{"text_input": p, "stream": True, "max_tokens": 100, "seed": Act.HOLD} for p in prompts],
    )
    wait_until(lambda: scripted.status()["running"] == 16, 20.0, "sixteen streams run")
    _one_by_one(scripted, context)
    assert scripted.status()["running"] == 16
    assert scripted.generate(text_input="x", max_tokens=1, seed=Act.RELEASE)[0] == 200
    for prompt, got in zip(prompts, streams.join(60.0), strict=True):
        ids = tokenizer.encode(prompt)
        got.check_stream(len(ids), 100)
        assert got.text == tokenizer.decode(answer(ids, 100))
        assert got.finals == 1


def test_error_names_the_step(scripted: Server) -> None:
    status, body = scripted.generate(text_input="x", temperature=-1.0)
    assert status == 400
    assert "preprocess: temperature: must be in [0, 100] (got -1.0)" in body["error"]


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"input_ids": [5, -1]}, ["input_ids", "-1"]),
        ({"input_ids": [5, 1 << 30]}, ["input_ids", str(1 << 30)]),
        ({"input_ids": []}, ["input_ids", "empty"]),
        ({"input_ids": [5], "sampling_parameters": '{"max_tokens": 0}'}, ["max_tokens"]),
        ({"input_ids": [5], "sampling_parameters": '{"stop": ["a"]}'}, ["stop", "ensemble"]),
        ({"input_ids": [5], "sampling_parameters": "{"}, ["sampling_parameters", "JSON"]),
    ],
)
def test_glm_dsa_refuses_bad_token_requests(
    scripted: Server, tensors: dict[str, Any], said: list[str]
) -> None:
    got = scripted.grpc_stream("glm_dsa", **tensors)
    for word in said:
        assert word in got.error, got.error
    assert got.responses == []
