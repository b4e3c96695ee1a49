# SPDX-License-Identifier: Apache-2.0
"""A vocabulary of letters for grammars in tests, as wide as the fake ranks'."""

from __future__ import annotations

from llguidance import LLTokenizer, TokenizerWrapper

from glmserve.text.grammar_vocabulary import GrammarVocabulary
from tests.engine.fake_ranks import VOCAB

EOS, THINK_END, CALL = 3, 2, 4
A, B, C, AB, BC = 5, 6, 7, 65, 66
LETTERS = "start: /[ABC]{4,30}/"


class _Words:
    """Ids 5.. are letters from A on, 65 and 66 two letters each; 2, 3 and 4 are control tokens."""

    eos_token_id, bos_token_id = EOS, None
    special_token_ids = (THINK_END, EOS, CALL)

    def __init__(self) -> None:
        letters = [chr(60 + token).encode() for token in range(5, 65)]
        control = [b"\xff</think>", b"\xff<eos>", b"\xff<tool_call>"]
        self.tokens = [b"0", b"1", *control, *letters, b"AB", b"BC"]
        self.tokens += [f"w{token}".encode() for token in range(len(self.tokens), VOCAB)]

    def __call__(self, text: str) -> list[int]:
        return [ord(character) - 60 for character in text]


def vocabulary() -> GrammarVocabulary:
    made = LLTokenizer(TokenizerWrapper(_Words()), n_vocab=VOCAB, eos_token=[EOS])
    return GrammarVocabulary(made, (EOS,), (EOS, CALL))
