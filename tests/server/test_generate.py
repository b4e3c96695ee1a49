# SPDX-License-Identifier: Apache-2.0
"""Answers over every protocol: text, order, one final, reasons and counts. Tokens are scripted."""

from __future__ import annotations

import http.client
import json
import subprocess
import time
from collections.abc import Callable

import pytest

from glmserve.text.tokenizer import Tokenizer
from tests.server.harness import Answer, Server, in_parallel, in_parallel_aio, wait_until
from tests.server.scripted_engine import CACHED, Act, answer

STREAMS = 16
TOKENS = 200


def _prompts() -> list[str]:
    return [f"Stream {i} counts {i * 7919} apples, 苹果 and ünïcode: " for i in range(STREAMS)]


def _expected(tokenizer: Tokenizer, prompt: str, tokens: int = TOKENS) -> str:
    return tokenizer.decode(answer(tokenizer.encode(prompt), tokens))


def _check(answers: list[Answer], tokenizer: Tokenizer) -> None:
    for prompt, got in zip(_prompts(), answers, strict=True):
        got.check_stream(len(tokenizer.encode(prompt)), TOKENS)
        assert got.text == _expected(tokenizer, prompt)
        assert got.finish_reason == "length"


def test_generate_gives_one_response_with_the_whole_text(
    scripted: Server, tokenizer: Tokenizer
) -> None:
    status, body = scripted.generate(text_input="one two", max_tokens=50)
    assert status == 200
    assert body["text_output"] == _expected(tokenizer, "one two", 50)
    assert (body["finish_reason"], body["num_output_tokens"], body["index"]) == ("length", 50, 0)
    assert body["tool_calls"] == "[]"
    assert body["error_message"] == ""


def test_concurrent_generate_stream(scripted: Server, tokenizer: Tokenizer) -> None:
    calls: list[Callable[[], Answer]] = [
        lambda p=p: scripted.generate_stream(text_input=p, max_tokens=TOKENS) for p in _prompts()
    ]
    _check(in_parallel(calls), tokenizer)


def test_concurrent_grpc_streams_end_with_one_final(scripted: Server, tokenizer: Tokenizer) -> None:
    calls: list[Callable[[], Answer]] = [
        lambda p=p: scripted.grpc_stream(text_input=p, stream=True, max_tokens=TOKENS)
        for p in _prompts()
    ]
    answers = in_parallel(calls)
    _check(answers, tokenizer)
    assert [got.finals for got in answers] == [1] * STREAMS


def test_concurrent_aio_streams_end_with_one_final(scripted: Server, tokenizer: Tokenizer) -> None:
    requests = [{"text_input": p, "stream": True, "max_tokens": TOKENS} for p in _prompts()]
    answers = in_parallel_aio(scripted, requests)
    _check(answers, tokenizer)
    assert [got.finals for got in answers] == [1] * STREAMS


def test_stream_false_over_grpc_is_one_data_response(
    scripted: Server, tokenizer: Tokenizer
) -> None:
    got = scripted.grpc_stream(text_input="one two", max_tokens=20)
    got.check_stream(len(tokenizer.encode("one two")), 20)
    assert len(got.responses) == got.finals == 1


def test_the_announced_curl_line_works(scripted: Server) -> None:
    done = subprocess.run(scripted.curl, shell=True, capture_output=True, text=True, timeout=30)
    assert '"finish_reason":"length"' in done.stdout, done


def test_the_same_setting_by_parameter_tensor_and_json(
    scripted: Server, tokenizer: Tokenizer
) -> None:
    """JSON wins over a tensor, a tensor over a request parameter."""
    expected = {n: _expected(tokenizer, "a b c", n) for n in (4, 7)}
    # A parameter that names an input becomes that tensor in the server itself.
    assert (
        scripted.generate(text_input="a b c", parameters={"max_tokens": 7})[1]["text_output"]
        == (expected[7])
    )
    both = scripted.generate(
        text_input="a b c", max_tokens=7, sampling_parameters='{"max_tokens": 4, "top_p": 0.5}'
    )
    assert both[1]["text_output"] == expected[4]


def test_a_stock_frontend_in_vllm_mode_is_understood(
    scripted: Server, tokenizer: Tokenizer
) -> None:
    """The tensors that it sends, with the settings that it fills in by itself."""
    settings = {"frequency_penalty": 0.0, "logprobs": False, "n": 1, "presence_penalty": 0.0}
    settings |= {"temperature": 0.7, "top_p": 1.0, "max_tokens": 9}
    got = scripted.grpc_stream(
        text_input="one two",
        stream=True,
        exclude_input_in_output=True,
        sampling_parameters=json.dumps(settings),
        return_num_input_tokens=True,
        return_num_output_tokens=True,
    )
    got.check_stream(len(tokenizer.encode("one two")), 9)
    assert got.text == _expected(tokenizer, "one two", 9)


def test_tensorrt_llm_names_are_understood(scripted: Server, tokenizer: Tokenizer) -> None:
    got = scripted.grpc_stream(
        text_input="one two",
        stream=True,
        max_tokens=9,
        min_tokens=2,
        temperature=0.7,
        top_k=5,
        top_p=0.5,
        seed=int(Act.ANSWER),
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        length_penalty=1.0,
        beam_width=1,
        stop_words=["never written"],
        bad_words=["neither"],
    )
    assert got.text == _expected(tokenizer, "one two", 9)


def test_logprobs_go_out_with_their_tokens(scripted: Server, tokenizer: Tokenizer) -> None:
    ids = answer(tokenizer.encode("one two"), 30)
    got = scripted.grpc_stream(
        text_input="one two",
        stream=True,
        sampling_parameters='{"max_tokens": 30, "logprobs": 2}',
    )
    entries = [entry for r in got.responses for entry in json.loads(r["logprobs"])]
    assert [list(entry) for entry in entries] == [[str(i), str(i + 1)] for i in ids]
    for i, entry in zip(ids, entries, strict=True):
        own = entry[str(i)]
        assert (own["logprob"], own["rank"]) == (-1.0 - i / 8, 2)
        assert bytes(own["bytes"]) == tokenizer.decode([i]).encode()
    total = sum(-1.0 - i / 8 for i in ids)
    assert got.responses[-1]["cumulative_logprob"] == pytest.approx(total, rel=1e-6)
    counts = [len(json.loads(r["logprobs"])) for r in got.responses]
    assert counts == [r["num_output_tokens"] for r in got.responses]


def test_logprobs_are_null_unless_asked_for(scripted: Server) -> None:
    _, body = scripted.generate(text_input="one two", max_tokens=3)
    assert (body["logprobs"], body["cumulative_logprob"]) == ("null", 0)
    _, body = scripted.generate(text_input="one two", max_tokens=3, return_logprobs=True)
    assert len(json.loads(body["logprobs"])) == 3


def test_tokens_behind_a_stop_string_are_not_counted(scripted: Server) -> None:
    _, body = scripted.generate(
        text_input="alpha END omega ",
        max_tokens=60,
        stop_words=["END"],
        return_cumulative_logprob=True,
    )
    assert body["num_output_tokens"] == len(json.loads(body["logprobs"])) < 16
    assert body["num_cached_tokens"] == CACHED


def test_stop_string_ends_a_stream_at_once(scripted: Server, tokenizer: Tokenizer) -> None:
    """The script would never end; nothing follows the text before the stop string."""
    prompt = "alpha beta gamma delta END omega "
    got = scripted.grpc_stream(
        text_input=prompt, stream=True, max_tokens=1500, stop_words=["END"], seed=Act.HOLD
    )
    assert got.error == ""
    assert got.text == "alpha beta gamma delta "
    assert got.finish_reason == "stop"
    assert got.responses[-1]["stop_reason"] == '"END"'
    assert got.finals == 1
    assert sum(r["num_output_tokens"] for r in got.responses) <= len(tokenizer.encode(prompt))
    wait_until(lambda: scripted.status()["running"] == 0, 20.0, "the engine was told")


def test_nothing_follows_a_stop_string_in_busy_streams(scripted: Server) -> None:
    """Sixteen fast streams keep postprocess behind the engine when its stop strings match."""
    calls: list[Callable[[], Answer]] = [
        lambda i=i: scripted.grpc_stream(
            text_input=f"{'word ' * (7 * i)}END omega ",
            stream=True,
            max_tokens=1500,
            stop_words=["END"],
        )
        for i in range(1, STREAMS + 1)
    ]
    for i, got in enumerate(in_parallel(calls), start=1):
        assert (got.error, got.text, got.finals) == ("", "word " * (7 * i), 1)
        reasons = [r["finish_reason"] for r in got.responses]
        assert reasons == [""] * (len(reasons) - 1) + ["stop"]


def test_stop_string_ends_generate_before_its_tokens_are_made(scripted: Server) -> None:
    status, body = scripted.generate(
        text_input="alpha beta END omega ", max_tokens=1500, stop_words=["END"], seed=Act.HOLD
    )
    assert status == 200
    assert (body["text_output"], body["finish_reason"]) == ("alpha beta ", "stop")
    wait_until(lambda: scripted.status()["running"] == 0, 20.0, "the engine was told")


def test_echo_repeats_the_prompt(scripted: Server, tokenizer: Tokenizer) -> None:
    _, body = scripted.generate(text_input="one two", max_tokens=5, exclude_input_in_output=False)
    assert body["text_output"] == "one two" + _expected(tokenizer, "one two", 5)


def test_silent_stream_gets_empty_responses(scripted: Server, tokenizer: Tokenizer) -> None:
    started = time.monotonic()
    got = scripted.grpc_stream(text_input="one two", stream=True, max_tokens=6, seed=Act.SILENT)
    seconds = time.monotonic() - started
    got.check_stream(len(tokenizer.encode("one two")), 6)
    assert got.text == _expected(tokenizer, "one two", 6)
    empty = [r for r in got.responses if r["num_output_tokens"] == 0]
    assert 2 <= len(empty) <= seconds / 0.5  # one in half a second, for three seconds
    assert [r["text_output"] for r in empty] == [""] * len(empty)


def test_chat_messages_are_rendered(scripted: Server) -> None:
    messages = '[{"role": "user", "content": "Hello"}]'
    got = scripted.generate_stream(messages=messages, max_tokens=40)
    assert got.error == ""
    assert got.responses[-1]["finish_reason"] == "length"
    assert got.responses[0]["num_input_tokens"] > 3
    # The prompt ends in <think> and the script never closes it: everything is reasoning.
    assert "Hello" in "".join(r["reasoning_content"] for r in got.responses)
    assert got.text == ""
    assert sum(r["num_reasoning_tokens"] for r in got.responses) == 40


def test_glm_dsa_answers_token_ids_directly(scripted: Server) -> None:
    ids = [5, 6, 7]
    got = scripted.grpc_stream(
        "glm_dsa", input_ids=ids, stream=True, sampling_parameters='{"max_tokens": 8}'
    )
    assert got.error == ""
    assert got.finals == 1
    sent = [token for r in got.responses for token in r["output_ids"]]
    assert sent == answer(ids, 8)
    assert got.finish_reason == "length"
    assert [r["index"] for r in got.responses] == list(range(len(got.responses)))


def test_error_after_the_first_token_travels_as_data(
    scripted: Server, tokenizer: Tokenizer
) -> None:
    got = scripted.grpc_stream(
        text_input="one two", stream=True, max_tokens=50, seed=Act.FAIL_LATER
    )
    assert got.error == ""
    assert got.finish_reason == "error"
    assert got.responses[-1]["error_message"] == "the script failed"
    assert got.text == _expected(tokenizer, "one two", 3)
    assert got.finals == 1


def test_error_before_the_first_token_is_a_status(scripted: Server) -> None:
    for act, reason in ((Act.FAIL_AT_ONCE, "the script failed"), (Act.QUEUE_FULL, "queue is full")):
        got = scripted.grpc_stream(text_input="one two", stream=True, max_tokens=50, seed=act)
        assert reason in got.error
        status, body = scripted.generate(text_input="one two", max_tokens=50, seed=act)
        assert (status, reason in body["error"]) == (400, True)


_LONG = {"text_input": "one two", "stream": True, "max_tokens": 1500, "seed": Act.HOLD}


def test_http_client_that_leaves_ends_its_request(scripted: Server) -> None:
    """The server does not cancel a running step of an ensemble: postprocess tells glm_dsa."""
    connection = http.client.HTTPConnection("127.0.0.1", scripted.http_port, timeout=60)
    connection.request("POST", "/v2/models/ensemble/generate_stream", json.dumps(_LONG))
    connection.getresponse().readline()
    assert scripted.status()["running"] == 1
    connection.close()
    wait_until(lambda: scripted.status()["running"] == 0, 20.0, "the request was cancelled")


def test_cancelled_grpc_stream_ends_its_request(scripted: Server) -> None:
    with scripted.open_stream(**_LONG) as stream:
        stream.read()
        assert scripted.status()["running"] == 1
        stream.cancel()
    wait_until(lambda: scripted.status()["running"] == 0, 20.0, "the request was cancelled")


def test_cancelled_direct_stream_ends_its_request(scripted: Server) -> None:
    sampling = json.dumps({"max_tokens": 1500, "seed": Act.HOLD})
    with scripted.open_stream(
        "glm_dsa", input_ids=[5, 6], stream=True, sampling_parameters=sampling
    ) as stream:
        stream.read()
        assert scripted.status()["running"] == 1
        stream.cancel()
    wait_until(lambda: scripted.status()["running"] == 0, 20.0, "the request was cancelled")


def test_relay_cancels_by_uid(scripted: Server, tokenizer: Tokenizer) -> None:
    relay = scripted.relay()
    with scripted.open_stream(**_LONG) as stream:
        stream.read()
        assert relay.tell(op="cancel", uid="0" * 32)  # nobody's
        assert relay.tell(op="cancel", uid=stream.answer.responses[0]["request_uid"])
        stream.read_to_end()
    relay.close()
    got = stream.answer
    assert (got.finish_reason, got.finals) == ("abort", 1)
    whole = _expected(tokenizer, "one two", 1500)
    assert whole.startswith(got.text) and 0 < len(got.text) < len(whole)


def test_bad_words_become_the_tokens_of_both_spellings(
    scripted: Server, tokenizer: Tokenizer
) -> None:
    with scripted.open_stream("preprocess", text_input="x", bad_words=["never"]) as stream:
        stream.read()
    settings = json.loads(stream.answer.responses[0]["sampling_parameters"])
    assert settings["bad_words"] == []
    spelled = [tokenizer.decode(ids) for ids in settings["bad_word_ids"]]
    assert spelled == ["never", " never"]
