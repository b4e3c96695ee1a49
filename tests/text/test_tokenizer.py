# SPDX-License-Identifier: Apache-2.0
"""Tokenizer: parity with transformers, markers on and off, the id table, synthetic files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from glmserve.errors import CheckpointError, ConfigError
from glmserve.text import markers
from glmserve.text.synthetic_tokenizer import MIN_VOCAB_SIZE, template_source, write_tokenizer
from glmserve.text.tokenizer import Tokenizer, byte_alphabet
from tests.text.conftest import HEAD_ROWS

OPEN, CLOSE = "\U0010ff00", "\U0010ff01"


def test_transformers_loads_the_same_tokenizer(checkpoint: Path, tokenizer: Tokenizer) -> None:
    theirs = AutoTokenizer.from_pretrained(checkpoint)
    text = "[gMASK]<sop><|user|>Hello, 你好 🌶 123456\n\n  it's<|assistant|><think>/nothink "
    ids = tokenizer.encode(text)
    for special in (True, False):
        assert theirs(text, add_special_tokens=special).input_ids == ids.tolist()
    assert theirs.decode(ids, skip_special_tokens=True) == tokenizer.decode(ids)
    assert tokenizer.decode(ids, skip_special=False) == text
    assert (theirs.eos_token_id, theirs.pad_token_id) == (
        theirs.convert_tokens_to_ids("<|endoftext|>"),
    ) * 2
    prompt = theirs.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert prompt == "[gMASK]<sop><|system|>Reasoning Effort: Max<|user|>Hi"


def test_added_tokens_follow_the_base_vocabulary_in_glms_order(checkpoint: Path) -> None:
    spec = json.loads((checkpoint / "tokenizer.json").read_text("utf-8"))
    base = len(spec["model"]["vocab"])
    added = spec["added_tokens"]
    assert [token["id"] for token in added] == list(range(base, base + 36))
    assert [(token["content"], token["special"]) for token in added] == list(markers.ADDED_TOKENS)
    assert not any(token[flag] for token in added for flag in ("lstrip", "rstrip", "normalized"))
    assert spec["model"]["ignore_merges"] and not spec["model"]["byte_fallback"]
    assert [markers.ADDED_TOKENS[place][0] for place in (0, 7, 9, 21, 22, 31, 35)] == [
        *("<|endoftext|>", "<|user|>", "<|observation|>", "<think>", "</think>"),
        *("/nothink", "<|video|>"),
    ]
    assert base + 36 <= HEAD_ROWS - 8, "some rows of the head have no text"


def test_ordinary_text_compresses(tokenizer: Tokenizer) -> None:
    text = "What is the weather in the city? Please write the answer and the result of the work."
    assert len(tokenizer.encode(text)) < len(text) / 1.7


@pytest.mark.parametrize("rows", [MIN_VOCAB_SIZE, 384, 1024, 5000])
def test_any_head_size(rows: int, tmp_path: Path) -> None:
    info = write_tokenizer(tmp_path, rows, seed=3)
    tokenizer = Tokenizer(tmp_path)
    assert info.vocab_size == tokenizer.vocab_size <= rows - 8
    assert tokenizer.eos_token_ids == info.eos_token_ids
    assert None not in tokenizer.entries
    assert tokenizer.decode(tokenizer.encode("naïve 漢字")) == "naïve 漢字"
    assert (tmp_path / "chat_template.jinja").read_text("utf-8") == template_source()
    assert b"\r" not in (tmp_path / "chat_template.jinja").read_bytes()


def test_files_depend_on_the_arguments_only(tmp_path: Path) -> None:
    files = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_tokenizer(tmp_path / name, 512, seed)
        files.append((tmp_path / name / "tokenizer.json").read_bytes())
    assert files[0] == files[1] != files[2]


def test_too_small_a_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vocab_size = 299"):
        write_tokenizer(tmp_path, MIN_VOCAB_SIZE - 1)


def test_eos_ids_come_from_generation_config(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 512)
    for declared, expected in ((7, (7,)), ([7, 8], (7, 8))):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": declared}))
        assert Tokenizer(tmp_path).eos_token_ids == expected


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)


def test_encoding_gives_int32(tokenizer: Tokenizer) -> None:
    for text in ("", "a"):
        ids = tokenizer.encode(text)
        assert ids.dtype == np.int32
        assert ids.shape == (len(text),)


def test_special_tokens_have_no_text_and_markers_have(tokenizer: Tokenizer) -> None:
    for name, special in markers.ADDED_TOKENS:
        token = tokenizer.marker_id(name)
        assert token is not None
        assert tokenizer.entries[token] == ("" if special else name)
    assert tokenizer.marker_id("<tools>") is None
    assert set(tokenizer.markers.values()) == set(markers.OUTPUT_MARKERS)


def test_byte_alphabet_is_a_bijection() -> None:
    alphabet = byte_alphabet()
    assert len(set(alphabet.values())) == len(alphabet) == 256
    assert (alphabet[ord("A")], alphabet[ord(" ")], alphabet[ord("\n")]) == ("A", "Ġ", "Ċ")


def test_markers_off_encodes_letters(tokenizer: Tokenizer) -> None:
    text = "say <|assistant|><think>"
    ids = tokenizer.encode(text, markers=False)
    assert not set(ids.tolist()) & set(tokenizer.added_tokens.values())
    assert tokenizer.decode(ids, skip_special=False) == text


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(parts=st.lists(st.sampled_from(["a b", "<|user|>", "<think>", " ", "你", "</think>x"])))
def test_shielded_markers_are_encoded_as_letters_in_their_context(
    tokenizer: Tokenizer, parts: list[str]
) -> None:
    user = "".join(parts)
    shielded = user
    for name in ("<|user|>", "<think>", "</think>"):
        shielded = shielded.replace(name, OPEN + name + CLOSE)
    ids = tokenizer.encode_shielded(f"<|user|>{shielded}<|assistant|>", OPEN, CLOSE)
    expected = [
        tokenizer.marker_id("<|user|>"),
        *tokenizer.encode(user, markers=False),
        tokenizer.marker_id("<|assistant|>"),
    ]
    assert ids.tolist() == expected
