# SPDX-License-Identifier: Apache-2.0
"""One request's grammar in the engine: masks along drafts, and what ends or breaks them."""

from __future__ import annotations

import random

import numpy as np
import pytest
from llguidance import LLMatcher

from glmserve.engine.grammar_state import Grammars, Mask
from glmserve.text.grammar_vocabulary import GrammarVocabulary
from tests.engine.fake_ranks import VOCAB
from tests.engine.words import AB, BC, CALL, EOS, LETTERS, THINK_END, A, B, C, vocabulary


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(vocabulary, VOCAB)


def ids_of(mask: Mask) -> set[int]:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return set(bits.nonzero()[0].tolist())


def allowed(grammars: Grammars, text: str, tokens: list[int]) -> set[int]:
    """What a fresh matcher allows after `tokens`."""
    matcher = LLMatcher(grammars.vocabulary.tokenizer, text, log_level=0)
    assert matcher.consume_tokens(tokens) or not tokens
    return ids_of(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint32))


def test_masks_along_drafts_are_those_of_the_tokens_themselves(grammars: Grammars) -> None:
    state = grammars.start(LETTERS, None, (EOS,))
    assert [ids_of(m) for m in state.masks(1, 0)] == [allowed(grammars, LETTERS, [])]
    state.advance([A, BC], (AB, C, A))
    for _ in range(2):  # they leave no trace
        got = [ids_of(mask) for mask in state.masks(4, 0)]
        path = [A, BC, AB, C, A]
        assert got == [allowed(grammars, LETTERS, path[:n]) for n in range(2, 6)]
    assert EOS not in got[0] and EOS in got[1]
    state.advance([AB, A], ())
    assert ids_of(state.masks(1, 0)[0]) == allowed(grammars, LETTERS, [A, BC, AB, A])


def test_masks_stop_where_a_draft_is_forbidden_or_ends_the_answer(grammars: Grammars) -> None:
    for drafts, places in (((A, 9, A), 2), ((9, A, A), 1), ((A, EOS, A), 2), ((VOCAB + 5, A), 1)):
        state = grammars.start('start: "AAA"? /[ABC]*/', None, (EOS,))
        state.advance([], drafts)
        assert len(state.masks(4, 0)) == places
        state.advance([A, A], ())
        assert not state.error
        assert ids_of(state.masks(1, 0)[0]) == {A, B, C, AB, BC, EOS}


def test_at_the_end_only_eos_is_left_also_behind_drafts(grammars: Grammars) -> None:
    state = grammars.start('start: "AB"', None, (EOS,))
    state.advance([A], (B, EOS, A))
    assert [ids_of(mask) for mask in state.masks(4, 0)] == [{B}, {EOS}]
    state.advance([B], (EOS, A, B))
    assert [ids_of(mask) for mask in state.masks(4, 0)] == [{EOS}]
    state.advance([EOS], ())
    assert not state.error


def test_a_grammar_waits_for_its_token_and_nothing_may_end_the_answer_before(
    grammars: Grammars,
) -> None:
    state = grammars.start("start: /A[BC]/", THINK_END, (EOS,))
    before = set(range(VOCAB)) - {EOS, CALL}
    state.advance([C, B], (C, THINK_END, A))
    masks = [ids_of(mask) & set(range(VOCAB)) for mask in state.masks(4, 0)]
    assert masks == [before, before, {A, AB}, {B, C}]
    state.advance([C, THINK_END], (AB,))
    assert [ids_of(mask) for mask in state.masks(2, 0)] == [{A, AB}, {EOS}]
    state.advance([A, B], ())
    assert ids_of(state.masks(1, 0)[0]) == {EOS}


def test_early_places_may_not_end_the_answer_unless_nothing_else_is_left(
    grammars: Grammars,
) -> None:
    state = grammars.start("start: /A{0,2}/", None, (EOS, A))
    state.advance([], (AB,))
    assert [ids_of(mask) for mask in state.masks(1, 1)] == [{A, EOS}]
    state = grammars.start("start: /A{0,2}/", None, (EOS,))
    state.advance([], (A, A))
    assert [ids_of(m) for m in state.masks(3, 2)] == [{A}, {A}, {EOS}]
    assert [ids_of(m) for m in state.masks(3, 3)] == [{A}, {A}, {EOS}]


@pytest.mark.parametrize("text", ["start: nothing", "start: /(?=A)/", 'start: a\na: a "A"'])
def test_a_grammar_that_cannot_be_followed_says_why_and_masks_nothing(
    grammars: Grammars, text: str
) -> None:
    state = grammars.start(text, None, (EOS,))
    masks = state.masks(3, 0)
    assert len(masks) == 1
    assert "cannot be followed" in state.error
    state.advance([A], ())  # changes nothing


def test_a_token_that_the_mask_forbids_is_an_error(grammars: Grammars) -> None:
    state = grammars.start('start: "AB"', None, (EOS,))
    state.masks(1, 0)
    state.advance([C], ())
    assert "other settings" in state.error


def test_a_vocabulary_that_cannot_be_read_is_the_requests_error() -> None:
    def broken() -> GrammarVocabulary:
        raise ValueError("no such file")

    state = Grammars(broken, VOCAB).start(LETTERS, None, (EOS,))
    state.masks(1, 0)
    assert "no such file" in state.error
    state.advance([A], ())


def test_random_walks_leave_matchers_as_fresh_ones(grammars: Grammars) -> None:
    text = 'start: item ("0" item)*\nitem: "A" item? "B" | /C{1,3}/ | "ABC"'
    generator = random.Random(4)
    for _ in range(20):
        state, path = grammars.start(text, None, (EOS,)), []
        while EOS not in path and len(path) < 25:
            truth = allowed(grammars, text, path)
            drafts: list[int] = []
            while len(drafts) < 3 and EOS not in drafts:
                choices = sorted(allowed(grammars, text, path + drafts))
                drafts.append(generator.choice([*choices, A, 9]))
                if drafts[-1] not in choices:
                    break
            state.advance([], tuple(drafts))
            assert ids_of(state.masks(4, 0)[0]) == truth
            token = generator.choice(sorted(truth))
            path.append(token)
            state.advance([token], ())
            assert not state.error
