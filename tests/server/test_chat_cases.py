# SPDX-License-Identifier: Apache-2.0
"""The handed cases through the running ensemble: their model output is played as token ids."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from glmserve.text.output import OutputDelta
from glmserve.text.tokenizer import Tokenizer
from tests.server.harness import Server
from tests.server.scripted_engine import Act
from tests.text.support import Case, answer_of, case_id, cases, expected

# What the served template can leave at a prompt's end, and the messages that make it do so.
_USER = {"role": "user", "content": "Hi"}
_PREFILLED = {"role": "assistant", "content": "", "reasoning_content": ""}
PROMPTS: dict[str, dict[str, Any]] = {
    "<|assistant|><think>": {"messages": json.dumps([_USER])},
    "<|assistant|><think></think>": {
        "messages": json.dumps([_USER, _PREFILLED]),
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
}
CASES = [
    case
    for case in cases("reasoning", "tool", "stop")
    if case["options"]["prompt_tail"] in PROMPTS
    and not {"tokens", "expect_error"} & set(case["options"])
    and case["options"].get("unknown_tool", "drop") == "drop"  # the server's setting
]


def _request(case: Case, ids: list[int], **more: Any) -> dict[str, Any]:
    given = case["options"]
    sampling = {"seed": int(Act.PLAY), "allowed_token_ids": ids, "logprobs": 0, **more}
    if given.get("include_stop_str_in_output"):
        sampling["include_stop_str_in_output"] = True
    request = {
        **PROMPTS[given["prompt_tail"]],
        "sampling_parameters": json.dumps(sampling),
        "max_tokens": len(ids) + 1,
    }
    if case["tools"]:
        request["tools"] = json.dumps(case["tools"])
    if "stop" in given:
        request["stop_words"] = given["stop"]
    for name in ("tool_choice", "parallel_tool_calls"):
        if name in given:
            request[name] = given[name]
    return request


def _joined(responses: list[dict[str, Any]]) -> dict[str, Any]:
    return answer_of(
        OutputDelta(
            r["text_output"],
            r["reasoning_content"],
            tuple(json.loads(r["tool_calls"])),
            r["finish_reason"] or None,
            json.loads(r["stop_reason"]),
        )
        for r in responses
    )


def _entries(responses: list[dict[str, Any]]) -> list[int]:
    """The tokens that have a logprob entry, in order."""
    return [int(next(iter(e))) for r in responses for e in json.loads(r["logprobs"])]


def _check(case: Case, ids: list[int], responses: list[dict[str, Any]]) -> None:
    assert _joined(responses) == expected(case)
    counted = sum(r["num_output_tokens"] for r in responses)
    assert _entries(responses) == ids[:counted]
    assert counted == len(ids) or "stop" in case["options"]
    if "</think>" in case["model_output"] and "<think>" not in case["model_output"]:
        assert sum(r["num_reasoning_tokens"] for r in responses) < counted


def test_most_handed_cases_are_covered() -> None:
    assert len(CASES) >= 48


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_a_case_streamed_and_whole(scripted: Server, tokenizer: Tokenizer, case: Case) -> None:
    ids = [*tokenizer.encode(case["model_output"]).tolist(), tokenizer.marker_id("<|user|>")]
    request = _request(case, ids)
    streamed = scripted.grpc_stream(stream=True, **request)
    assert (streamed.error, streamed.finals) == ("", 1)
    assert len(streamed.responses) > 1
    _check(case, ids, streamed.responses)
    status, body = scripted.generate(**request)
    assert status == 200, body
    _check(case, ids, [body])
    assert body["num_output_tokens"] == sum(r["num_output_tokens"] for r in streamed.responses)


def test_reasoning_tokens_are_those_before_the_closing_tag(
    scripted: Server, tokenizer: Tokenizer
) -> None:
    (case,) = (case for case in CASES if case["id"] == "t01-one")
    ids = [*tokenizer.encode(case["model_output"]).tolist(), tokenizer.marker_id("<|user|>")]
    got = scripted.generate_stream(**_request(case, ids))
    counted = sum(r["num_reasoning_tokens"] for r in got.responses)
    assert counted == ids.index(tokenizer.marker_id("</think>")) > 0


def test_min_tokens_of_a_request_holds_stop_strings_back(
    scripted: Server, tokenizer: Tokenizer
) -> None:
    (case,) = (case for case in cases("stop") if "tokens" in case["options"])
    pieces = [tokenizer.encode(piece).tolist() for piece in case["options"]["tokens"]]
    ids = [*itertools.chain(*pieces), tokenizer.marker_id("<|user|>")]
    request = _request(case, ids, min_tokens=sum(map(len, pieces[:3])))
    assert _joined(scripted.grpc_stream(stream=True, **request).responses) == expected(case)
    assert _joined([scripted.generate(**request)[1]]) == expected(case)


def test_a_held_back_call_and_stop_string_keep_every_logprob(
    scripted: Server, tokenizer: Tokenizer
) -> None:
    """`<tool_call>` without tools is text; `stop here` is held, let go, then met."""
    text = "ok</think>a <tool_call>b</tool_call> stop her stop here never"
    ids = tokenizer.encode(text).tolist()
    case: Case = {"options": {"prompt_tail": "<|assistant|><think>", "stop": ["stop here"]}}
    request = _request(case | {"tools": None}, ids)
    for responses in (
        scripted.grpc_stream(stream=True, **request).responses,
        scripted.generate_stream(**request).responses,
        [scripted.generate(**request)[1]],
    ):
        answer = _joined(responses)
        assert answer["content"] == "a <tool_call>b</tool_call> stop her "
        assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", "stop here")
        entries = _entries(responses)
        assert entries == ids[: len(entries)]
        assert tokenizer.decode(entries).endswith("stop here")
        assert len(entries) == sum(r["num_output_tokens"] for r in responses)
