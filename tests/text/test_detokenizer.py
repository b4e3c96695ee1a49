# SPDX-License-Identifier: Apache-2.0
"""Text appears when its characters are complete, and never for tokens without text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glmserve.text.detokenizer import Detokenizer, TokenWithoutText
from glmserve.text.output import OutputProcessor
from glmserve.text.output_options import OutputOptions
from glmserve.text.tokenizer import Entry, Tokenizer
from tests.text.support import SIZES, Case, case_id, cases, chunkings, in_sizes, in_two

REPLACEMENT = "\ufffd"


class Pieces:
    """A vocabulary made of a case's tokens, and the ids that spell the case."""

    def __init__(self, tokens: list[Any]) -> None:
        self.markers: dict[int, str] = {}
        self.entries: tuple[Entry, ...] = tuple(map(_entry, tokens))
        self.ids = list(range(len(tokens)))


def _entry(token: Any) -> Entry:
    if isinstance(token, dict):
        return "" if "special" in token else None
    raw = bytes.fromhex(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


def _single_bytes(tokens: list[Any]) -> list[Any]:
    """The same stream with one token a byte."""
    single: list[Any] = []
    for token in tokens:
        single += [token] if isinstance(token, dict) else in_sizes(token, 2)
    return single


def _texts(pieces: Pieces, groups: list[list[int]]) -> list[str]:
    processor = OutputProcessor(pieces, OutputOptions())
    return [processor.push(group).text for group in groups] + [processor.push([], "stop").text]


def _check(case: Case, pieces: Pieces, groups: list[list[int]]) -> None:
    if case["options"].get("expect_error"):
        with pytest.raises(TokenWithoutText):
            _texts(pieces, groups)
        return
    texts = _texts(pieces, groups)
    assert "".join(texts) == case["expect"]["text"]
    if case["expect"]["no_replacement_char_in_deltas"]:
        assert REPLACEMENT not in "".join(texts)


every_case = pytest.mark.parametrize("case", cases("detok"), ids=case_id)


@every_case
def test_fixed_sizes_and_splits(case: Case) -> None:
    for tokens in (case["tokens_utf8_hex"], _single_bytes(case["tokens_utf8_hex"])):
        pieces = Pieces(tokens)
        for size in SIZES:
            _check(case, pieces, in_sizes(pieces.ids, size))
        for groups in in_two(pieces.ids):
            _check(case, pieces, groups)


@every_case
@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_random_chunks(case: Case, data: st.DataObject) -> None:
    pieces = Pieces(case["tokens_utf8_hex"])
    _check(case, pieces, data.draw(chunkings(pieces.ids)))


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(raw=st.binary(max_size=30))
def test_any_bytes_decode_as_the_whole_does(raw: bytes) -> None:
    detokenizer = Detokenizer([bytes([byte]) for byte in range(256)])
    text = "".join(detokenizer.push(byte) for byte in raw) + detokenizer.flush()
    assert text == raw.decode("utf-8", "replace")


@pytest.mark.parametrize("token", [-1, 2, 10**9])
def test_ids_outside_the_vocabulary_are_errors(token: int) -> None:
    with pytest.raises(TokenWithoutText, match=str(token)):
        Detokenizer(["a", "b"]).push(token)


def test_special_token_inside_a_character_does_not_break_it() -> None:
    detokenizer = Detokenizer([b"\xe4\xbd", b"\xa0", ""])
    assert [detokenizer.push(token) for token in (0, 2, 1)] == ["", "", "你"]


def test_real_tokens_round_trip(tokenizer: Tokenizer) -> None:
    text = "Hello 你好 🌶️ 👩‍💻 naïve\n\tdef f(x):"
    detokenizer = Detokenizer(tokenizer.entries)
    texts = [detokenizer.push(int(token)) for token in tokenizer.encode(text)]
    assert "".join(texts) + detokenizer.flush() == text
