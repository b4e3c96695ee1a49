# SPDX-License-Identifier: Apache-2.0
"""Every handed reasoning, tool and stop case in every chunking, as text and as ids."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from glmserve.errors import InvalidInput
from glmserve.text.tokenizer import Tokenizer
from tests.text.support import (
    SIZES,
    Case,
    case_id,
    cases,
    chunkings,
    expected,
    in_sizes,
    in_two,
    options_of,
    parse_chunks,
    parse_ids,
    token_units,
)

# Cases that count tokens or expect an error have tests of their own below.
CASES = [
    case
    for case in cases("reasoning", "tool", "stop")
    if not {"tokens", "expect_error"} & set(case["options"])
]
every_case = pytest.mark.parametrize("case", CASES, ids=case_id)


def test_all_handed_cases_are_covered() -> None:
    assert len(CASES) == 53
    assert len(cases("reasoning", "tool", "stop")) == 55


@every_case
def test_whole_text_gives_the_expected_answer(case: Case) -> None:
    assert parse_chunks(case, [case["model_output"].encode()]) == expected(case)


@every_case
def test_fixed_sizes_give_the_same_answer(case: Case) -> None:
    text = case["model_output"].encode()
    ids = token_units(case["model_output"])
    for size in SIZES:
        assert parse_chunks(case, in_sizes(text, size)) == expected(case), size
        assert parse_ids(options_of(case), in_sizes(ids, size)) == expected(case), size


@every_case
def test_every_split_in_two_gives_the_same_answer(case: Case) -> None:
    for chunks in in_two(case["model_output"].encode()):
        assert parse_chunks(case, chunks) == expected(case), chunks
    options = options_of(case)
    for groups in in_two(token_units(case["model_output"])):
        assert parse_ids(options, groups) == expected(case), groups


@every_case
@settings(
    max_examples=50,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
def test_random_chunks_give_the_same_answer(case: Case, data: st.DataObject) -> None:
    chunks = data.draw(chunkings(case["model_output"].encode()))
    assert parse_chunks(case, chunks) == expected(case)
    groups = data.draw(chunkings(token_units(case["model_output"])))
    assert parse_ids(options_of(case), groups) == expected(case)


@every_case
def test_ids_of_a_real_vocabulary_give_the_same_answer(case: Case, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(case["model_output"])
    for size in (1, 2, 3, 4, len(ids)):
        assert parse_ids(options_of(case), in_sizes(ids, size), tokenizer) == expected(case), size


def test_min_tokens_counts_tokens() -> None:
    (case,) = (case for case in cases("stop") if "tokens" in case["options"])
    groups = [token_units(token) for token in case["options"]["tokens"]]

    class Whole:
        """A vocabulary with one id for each token of the case."""

        entries = tuple(case["options"]["tokens"])
        markers: dict[int, str] = {}  # noqa: RUF012

    ids = list(range(len(groups)))
    for size in SIZES:
        assert parse_ids(options_of(case), in_sizes(ids, size), Whole()) == expected(case)
    for split in in_two(ids):
        assert parse_ids(options_of(case), split, Whole()) == expected(case)


def test_empty_stop_string_is_refused() -> None:
    (case,) = (case for case in cases("stop") if "expect_error" in case["options"])
    with pytest.raises(InvalidInput, match="stop: a stop string must not be empty"):
        options_of(case)
