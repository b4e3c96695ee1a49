# SPDX-License-Identifier: Apache-2.0
"""Bounds of settings that the ranks' tables have room for."""

from __future__ import annotations

import pytest

from glmserve.errors import InvalidInput
from glmserve.kernels.logit_shaping import LONGEST_WORD, MOST_WORDS
from glmserve.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, SamplingParams


def test_bad_words_fit_the_tables() -> None:
    assert MAX_BAD_WORD_TOKENS == LONGEST_WORD
    assert 4 * MAX_BAD_WORDS == MOST_WORDS  # spellings of a text
    longest = tuple(range(LONGEST_WORD))
    assert SamplingParams(bad_word_ids=(longest,) * MOST_WORDS)
    with pytest.raises(InvalidInput, match="bad_word_ids: at most 32 ids"):
        SamplingParams(bad_word_ids=((1,), (*longest, 3)))
    with pytest.raises(InvalidInput, match="bad_word_ids: at most 256 sequences"):
        SamplingParams(bad_word_ids=((1,),) * (MOST_WORDS + 1))
