# SPDX-License-Identifier: Apache-2.0
"""n > 1: independent answers to one prompt, in one response or in streams of their own."""

from __future__ import annotations

import json
from typing import Any

import pytest

from glmserve.text.tokenizer import Tokenizer
from tests.server.harness import Answer, Server, wait_until
from tests.server.scripted_engine import Act

PROMPT = "Tell me about the long and winding road to the sea. " * 9  # more than two pages
SAMPLED = {"text_input": PROMPT, "temperature": 1.0, "max_tokens": 24}


def _n(count: int, **settings: Any) -> str:
    return json.dumps({"n": count, "ignore_eos": True, **settings})


def _choices(got: Answer, count: int) -> list[Answer]:
    """The responses of each choice; every one has a single choice and its own counter."""
    assert got.error == ""
    choices = [Answer() for _ in range(count)]
    for response in got.responses:
        choices[response["sequence_index"]].responses.append(response)
    for choice in choices:
        choice.check_stream(got.responses[0]["num_input_tokens"], SAMPLED["max_tokens"])
    return choices


@pytest.fixture(scope="module")
def alone(drafting: Server) -> list[str]:
    """The answers to seeds 40, 41 and 42, asked for one by one."""
    texts = [
        drafting.grpc_stream(stream=True, sampling_parameters=_n(1, seed=seed), **SAMPLED).text
        for seed in (40, 41, 42)
    ]
    assert len(set(texts)) == 3
    return texts


def test_choice_i_of_a_seed_is_the_answer_to_seed_plus_i(
    drafting: Server, alone: list[str]
) -> None:
    streamed = drafting.grpc_stream(stream=True, sampling_parameters=_n(3, seed=40), **SAMPLED)
    assert streamed.finals == 1
    choices = _choices(streamed, 3)
    assert [choice.text for choice in choices] == alone
    assert [choice.finish_reason for choice in choices] == ["length"] * 3
    over_http = drafting.generate_stream(sampling_parameters=_n(3, seed=40), **SAMPLED)
    assert [choice.text for choice in _choices(over_http, 3)] == alone


def test_generate_answers_with_one_element_a_choice(drafting: Server, alone: list[str]) -> None:
    """`n` as a parameter, and by TensorRT-LLM's name; the prompt is counted once."""
    common = {**SAMPLED, "seed": 40, "ignore_eos": True, "return_logprobs": True}
    for request in ({"n": 3}, {"num_return_sequences": 3}):
        status, body = drafting.generate(**common, **request)
        assert status == 200, body
        assert body["text_output"] == alone
        assert body["sequence_index"] == [0, 1, 2]
        assert body["finish_reason"] == ["length"] * 3
        assert body["num_output_tokens"] == [24] * 3
        assert [len(json.loads(part)) for part in body["logprobs"]] == [24] * 3
        assert isinstance(body["num_input_tokens"], int)
    got = drafting.grpc_stream(sampling_parameters=_n(3, seed=40), **SAMPLED)
    assert (got.finals, [r["text_output"] for r in got.responses]) == (1, [alone])


def test_unseeded_choices_differ(drafting: Server) -> None:
    got = drafting.grpc_stream(sampling_parameters=_n(4), **SAMPLED)
    assert len(set(got.responses[0]["text_output"])) == 4


def test_choices_share_the_pages_of_a_new_prompt(drafting: Server) -> None:
    """Rows of the prompt: all of it once, and for the others what no full page holds."""
    before = drafting.settled_metrics()
    request = SAMPLED | {"text_input": "A prompt that nobody has sent: " + PROMPT, "max_tokens": 1}
    got = drafting.grpc_stream(stream=True, sampling_parameters=_n(4, seed=1), **request)
    tokens = got.responses[0]["num_input_tokens"]
    shared = (tokens - 1) // 64 * 64
    assert shared >= 128
    rows = tokens + 3 * (tokens - shared)
    after = drafting.settled_metrics()
    assert after["engine_rows_total"] - before["engine_rows_total"] == rows
    assert after["prefix_cache_hits_total"] - before["prefix_cache_hits_total"] == 3 * shared
    cached = [0] * 4
    for response in got.responses:
        cached[response["sequence_index"]] = response["num_cached_tokens"]
    assert cached == [0, shared, shared, shared]


def _fields(responses: list[dict[str, Any]]) -> tuple[str, str, str]:
    reasoning = "".join(r["reasoning_content"] for r in responses)
    return reasoning, "".join(r["text_output"] for r in responses), responses[-1]["finish_reason"]


def test_each_choice_has_its_own_parser(scripted: Server) -> None:
    """The script gives both choices the same tokens, one of them late and the other slowly."""
    request = {"messages": '[{"role": "user", "content": "a</think>b"}]', "max_tokens": 30}
    alone = _fields(scripted.grpc_stream(stream=True, **request).responses)
    assert alone[0] and alone[1]
    got = scripted.grpc_stream(
        stream=True, sampling_parameters=json.dumps({"n": 2, "seed": int(Act.SLOW)}), **request
    )
    assert got.finals == 1
    for choice in (0, 1):
        own = [r for r in got.responses if r["sequence_index"] == choice]
        assert _fields(own) == alone


def test_a_choice_stops_or_fails_without_the_others(scripted: Server) -> None:
    """Choice 0 meets a stop string, choice 1 fails before its first token."""
    request = {"text_input": "alpha END omega ", "max_tokens": 60, "stop_words": ["END"]}
    sampling = json.dumps({"n": 2, "seed": int(Act.ANSWER)})
    got = scripted.grpc_stream(stream=True, sampling_parameters=sampling, **request)
    last = {r["sequence_index"]: r for r in got.responses}
    assert (got.error, got.finals, got.text) == ("", 1, "alpha ")
    assert [last[i]["finish_reason"] for i in (0, 1)] == ["stop", "error"]
    assert last[1]["error_message"] == "the script failed"
    _, body = scripted.generate(sampling_parameters=sampling, **request)
    assert body["text_output"] == ["alpha ", ""]
    assert body["finish_reason"] == ["stop", "error"]
    assert body["stop_reason"] == ['"END"', "null"]


def test_a_long_prompt_that_fails_is_refused_as_a_whole(scripted: Server) -> None:
    sampling = json.dumps({"n": 3, "seed": int(Act.QUEUE_FULL), "max_tokens": 5})
    got = scripted.grpc_stream(text_input=PROMPT, stream=True, sampling_parameters=sampling)
    assert (got.responses, "queue is full" in got.error) == ([], True)
    assert scripted.status()["running"] == 0


@pytest.mark.parametrize("stream", [True, False])
def test_cancelling_ends_every_choice(drafting: Server, tokenizer: Tokenizer, stream: bool) -> None:
    ids = tokenizer.encode(PROMPT).tolist()
    sampling = _n(4, max_tokens=3000)  # the metrics must see them run
    with drafting.open_stream(
        "glm_dsa", input_ids=ids, stream=stream, sampling_parameters=sampling
    ) as opened:
        wait_until(
            lambda: drafting.metrics()["num_requests_running"] == 4, 20.0, "four choices run"
        )
        opened.cancel()
    wait_until(lambda: drafting.status()["running"] == 0, 20.0, "the answer has ended")
    wait_until(
        lambda: drafting.metrics()["kv_cache_pages_used"] == 0, 20.0, "every choice has ended"
    )


def test_n_out_of_range_and_other_ways_to_get_several_are_refused(scripted: Server) -> None:
    for setting, value in (("n", 0), ("n", 17), ("n", "2"), ("best_of", 2)):
        status, body = scripted.generate(
            text_input="x", sampling_parameters=json.dumps({setting: value})
        )
        assert status == 400
        assert f"{setting}: " in body["error"]
