# SPDX-License-Identifier: Apache-2.0
"""`glmserve generate`: the text, the JSON summary, a prefix hit, companions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from glmserve import cli
from glmserve.checkpoint.synthetic import make_checkpoint
from glmserve.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    make_checkpoint(directory, "tiny", 5)
    return directory


PROMPT = "The quick brown fox jumps over the lazy dog, and then it does so again. " * 3


def test_json_and_text_say_the_same(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", "--checkpoint", str(checkpoint), "--prompt", PROMPT, "--seed", "3"]
    command += ["--max-tokens", "12", "--ignore-eos"]
    assert cli.main(command) == 0
    text = capsys.readouterr().out
    options = ["--json", "--logprobs", "0", "--drafts", "2", "--batch-with", "3", "--repeat", "2"]
    assert cli.main([*command, *options]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert Tokenizer(checkpoint).decode(summary["token_ids"]) == text.removesuffix("\n")
    assert len(summary["token_ids"]) == 12 == sum(summary["accepted_lengths"])
    assert len(summary["logprobs"]) == 12 and all(value <= 0 for value in summary["logprobs"])
    assert summary["cached_tokens"] == 64
    assert summary["finish_reason"] == "length"


def test_a_form_is_followed_or_refused(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", "--checkpoint", str(checkpoint), "--prompt", "x", "--seed", "3"]
    assert cli.main([*command, "--structured-outputs", '{"regex": "[0-9]{4}"}']) == 0
    text = capsys.readouterr().out.removesuffix("\n")
    assert len(text) == 4 and text.isdecimal()
    assert cli.main([*command, "--response-format", '{"type": "xml"}']) == 1
    assert "response_format.type" in capsys.readouterr().err


def test_a_missing_checkpoint_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", "--checkpoint", str(tmp_path / "none"), "--prompt", "x"]
    assert cli.main(command) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("glmserve generate: ")
