# SPDX-License-Identifier: Apache-2.0
"""`glmserve render` and `glmserve parse` as a user runs them."""

from __future__ import annotations

import argparse
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from glmserve.errors import GlmServeError, InvalidInput
from glmserve.text.commands import add_subcommands
from glmserve.text.tokenizer import Tokenizer
from tests.text.support import TESTS, Case, case_id, cases, expected

PARSE_CASES = [
    case
    for case in cases("reasoning", "tool", "stop")
    if not {"tokens", "expect_error"} & set(case["options"])
]


class Shell:
    """Runs a command line in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capfdbinary: Any) -> None:
        self._monkeypatch = monkeypatch
        self._capture = capfdbinary

    def __call__(self, *argv: str, stdin: str) -> str:
        parser = argparse.ArgumentParser()
        add_subcommands(parser.add_subparsers())
        args = parser.parse_args(argv)
        source = io.TextIOWrapper(io.BytesIO(stdin.encode()))
        self._monkeypatch.setattr(sys, "stdin", source)
        assert args.run(args) == 0
        sys.stdout.flush()
        output: bytes = self._capture.readouterr().out
        return output.decode()


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capfdbinary: Any) -> Shell:
    return Shell(monkeypatch, capfdbinary)


def _flags(case: Case, directory: Path) -> list[str]:
    given = case["options"]
    flags = ["--prompt-tail", given["prompt_tail"]]
    if case["tools"]:
        (directory / "tools.json").write_text(json.dumps(case["tools"]))
        flags += ["--tools", str(directory / "tools.json")]
    if "tool_choice" in given:
        flags += ["--tool-choice", given["tool_choice"]]
    if not given.get("parallel_tool_calls", True):
        flags += ["--no-parallel-tool-calls"]
    if "unknown_tool" in given:
        flags += ["--unknown-tool", given["unknown_tool"]]
    for stop in given.get("stop", ()):
        flags += ["--stop", stop]
    if given.get("include_stop_str_in_output"):
        flags += ["--include-stop"]
    return flags


@pytest.mark.parametrize("case", PARSE_CASES, ids=case_id)
def test_parse_gives_the_expected_answer(case: Case, shell: Shell, tmp_path: Path) -> None:
    flags = _flags(case, tmp_path)
    for extra in ([], ["--chunk", "3"]):
        output = shell("parse", *flags, *extra, stdin=case["model_output"])
        assert json.loads(output) == expected(case)


def test_parse_streams_deltas(shell: Shell) -> None:
    output = shell(
        *("parse", "--prompt-tail", "<|assistant|><think>", "--chunk", "1", "--stream"),
        *("--finish", "length"),
        stdin="a</think>bc",
    )
    deltas = [json.loads(line) for line in output.splitlines()]
    assert [delta.get("reasoning_content", "") for delta in deltas] == ["a", "", "", ""]
    assert [delta.get("content", "") for delta in deltas] == ["", "b", "c", ""]
    assert deltas[-1]["finish_reason"] == "length"


@pytest.mark.parametrize("wrong", [["--stop", ""], ["--chunk", "0"], ["--tool-choice", "required"]])
def test_parse_refuses_bad_options(wrong: list[str], shell: Shell) -> None:
    with pytest.raises(InvalidInput):
        shell("parse", "--prompt-tail", "<|assistant|>", *wrong, stdin="x")


def test_render_prints_the_prompt(shell: Shell, checkpoint: Path) -> None:
    for name in ("x12-results-order.glm-5.3", "x12-results-order.glm-5.2", "x16-image.glm-5.2"):
        (case,) = (case for case in cases("template") if case["id"] == name)
        flags = ["--checkpoint", str(checkpoint)]
        if case["template"] != "glm-5.3":
            flags = ["--template", str(TESTS / "templates" / f"{case['template']}.jinja")]
        request = {
            "model": "any",
            "messages": case["messages"],
            "tools": case["tools"],
            "chat_template_kwargs": case["kwargs"],
        }
        assert shell("render", *flags, stdin=json.dumps(request)) == case["expect_text"]


def test_render_prints_ids(shell: Shell, checkpoint: Path, tokenizer: Tokenizer) -> None:
    request = json.dumps({"messages": [{"role": "user", "content": "Hi <think>"}]})
    flags = ["render", "--checkpoint", str(checkpoint)]
    text = shell(*flags, stdin=request)
    ids = json.loads(shell(*flags, "--ids", stdin=request))
    assert ids == tokenizer.encode(text).tolist()
    plain = json.loads(shell(*flags, "--ids", "--plain-user-text", stdin=request))
    assert (
        plain.count(tokenizer.marker_id("<think>")) == ids.count(tokenizer.marker_id("<think>")) - 1
    )
    assert tokenizer.decode(plain, skip_special=False) == text


@pytest.mark.parametrize(
    ("stdin", "message"),
    [("{", "request: not valid JSON"), ("[]", "request: must be"), ("{}", "messages: ")],
)
def test_render_refuses_bad_requests(
    stdin: str, message: str, shell: Shell, checkpoint: Path
) -> None:
    with pytest.raises(GlmServeError, match=message):
        shell("render", "--checkpoint", str(checkpoint), stdin=stdin)


def test_render_needs_a_template(shell: Shell, tmp_path: Path) -> None:
    request = json.dumps({"messages": [{"role": "user", "content": "Hi"}]})
    with pytest.raises(InvalidInput, match="--checkpoint"):
        shell("render", stdin=request)
    with pytest.raises(GlmServeError, match="no chat template"):
        shell("render", "--checkpoint", str(tmp_path), stdin=request)
