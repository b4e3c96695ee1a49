# SPDX-License-Identifier: Apache-2.0
"""Inputs made for perf_analyzer have exact lengths; its exports are read as their streams were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.perf_analyzer import main
from glmserve.text.tokenizer import Tokenizer

TINY = Path(__file__).resolve().parents[2] / "checkpoints" / "tiny"
START = 1_796_000_000_000_000_000  # ns


def run(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.argv", ["perf_analyzer.py", *arguments])
    return main()


def request(*responses: tuple[float, dict[str, Any]]) -> dict[str, Any]:
    """A request of the export; `responses` are (ms after its start, outputs)."""
    return {
        "timestamp": START,
        "request_inputs": {},
        "response_timestamps": [START + round(ms * 1e6) for ms, _ in responses],
        "response_outputs": [outputs for _, outputs in responses],
    }


def tokens(count: int, **outputs: Any) -> dict[str, Any]:
    quiet = {"text_output": "", "tool_calls": "[]", "error_message": ""}
    return {**quiet, "num_input_tokens": 7, "num_output_tokens": count, **outputs}


THINKS = (
    request(  # a sign of life, two tokens of thinking, three more, the first of the answer, end
        (1000.0, tokens(0)),
        (1500.0, tokens(2, reasoning_content="a")),
        (1800.0, tokens(3, reasoning_content="b")),
        (1900.0, tokens(1, text_output="c")),
        (1900.5, tokens(0, finish_reason="stop")),
    )
)
CALLS = request((100.0, tokens(1)), (140.0, tokens(2, tool_calls='[{"index": 0}]')))
FAILS = request((5.0, tokens(1)), (9.0, tokens(0, error_message="rank 3 has gone")))
SILENT = request()


def report(
    records: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *options: str,
) -> tuple[int, dict[str, Any]]:
    load = {"mode": "concurrency", "value": 4}
    export = {"experiments": [{"experiment": load, "requests": records}]}
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(export))
    status = run(["report", str(path), "--json", *options], monkeypatch)
    (result,) = json.loads(capsys.readouterr().out)
    return status, result


def test_a_report_counts_tokens_not_responses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, result = report([THINKS], tmp_path, monkeypatch, capsys)
    assert status == 0
    assert result == {
        "load": "concurrency 4",
        "requests": 1,
        "failed": 0,
        "errors": [],
        "seconds": 1.901,  # the last response closes the window
        "input_tokens": 7,
        "output_tokens": 6,
        "requests_per_s": 0.526,
        "output_tokens_per_s": 3.16,
        "time_to_first_token_ms": [1500.0] * 3,
        "time_to_answer_ms": [1900.0] * 3,
        "inter_token_ms": [100.0] * 3,  # 400 ms for the four tokens after the first two
        "request_ms": [1900.0] * 3,
    }


def test_a_tool_call_is_an_answer_and_bounds_say_what_is_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bounds = ("--first-ms", "1500", "--between-ms", "99")
    status, result = report([THINKS, CALLS], tmp_path, monkeypatch, capsys, *bounds)
    assert status == 0
    assert result["requests"] == 2 and result["output_tokens"] == 9
    assert result["time_to_answer_ms"][0] == (1900.0 + 140.0) / 2
    assert result["good_requests_per_s"] == 0.526  # CALLS alone, of two in 1.9005 s


def test_failed_requests_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, result = report([CALLS, FAILS, SILENT], tmp_path, monkeypatch, capsys)
    assert status == 1
    assert (result["requests"], result["failed"]) == (3, 2)
    assert result["errors"] == ["no token came", "rank 3 has gone"]
    assert result["output_tokens"] == 3 and result["request_ms"] == [140.0] * 3


@pytest.mark.parametrize("shared", [0, 12])
def test_prompts_have_the_length_asked_for(
    shared: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--requests", "5", "--input-tokens", "40", "--output-tokens", "9"]
    asked += ["--checkpoint", str(TINY), "--shared-tokens", str(shared)]
    assert run(["inputs", *asked], monkeypatch) == 0
    data = json.loads(capsys.readouterr().out)["data"]
    encoded = [Tokenizer(TINY).encode(d["text_input"][0]).tolist() for d in data]
    assert [len(ids) for ids in encoded] == [40] * 5
    assert len({tuple(ids[:shared]) for ids in encoded}) == 1
    assert len({ids[shared] for ids in encoded}) > 1
    for d in data:
        assert (d["stream"], d["max_tokens"], d["ignore_eos"]) == ([True], [9], [True])


def test_chats_are_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = [{"role": "user", "content": '1 + 1 = "？"'}]
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": chat, "id": 3}) + "\n\n")
    assert run(["inputs", "--chats", str(path)], monkeypatch) == 0
    (body,) = json.loads(capsys.readouterr().out)["data"]
    assert json.loads(body.pop("messages")[0]) == chat
    assert body == {"stream": [True], "max_tokens": [128]}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["inputs"], "--checkpoint"),
        (["inputs", "--checkpoint", str(TINY), "--shared-tokens", "1024"], "--shared-tokens 1024"),
        (["report", "/nowhere/profile.json"], "/nowhere/profile.json cannot be read"),
    ],
)
def test_what_is_wrong_is_named(
    arguments: list[str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match=named):
        run(arguments, monkeypatch)
