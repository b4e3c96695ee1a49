# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's vocabulary as llguidance wants it: bytes of every id, and which are control.

Used where grammars are checked (preprocess) and where they are followed (the engine), so both
mean the same ids. llguidance is imported nowhere else but there and loads no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from llguidance import LLParserLimits, LLTokenizer, TokenizerWrapper

from glmserve.text import markers
from glmserve.text.tokenizer import Tokenizer

# The library's own bounds on time and memory; errors go to clients, so they show no state.
GRAMMAR_LIMITS = LLParserLimits(verbose_errors=False)
_CONTROL = b"\xff"  # llguidance's sign in front of a token that text never matches


class _Vocabulary:
    """The attributes that TokenizerWrapper reads."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> None:
        names = {token: name for name, token in tokenizer.added_tokens.items()}
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = None
        self.special_token_ids = sorted(names)
        self.tokens = [
            _CONTROL + names[token].encode()
            if token in names
            else entry.encode()
            if isinstance(entry, str)
            else entry or b""
            for token, entry in enumerate(tokenizer.entries)
        ]
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        """Ids of text that a grammar forces; markers in it are letters."""
        return [int(token) for token in self._tokenizer.encode(text, markers=False)]


class GrammarVocabulary(NamedTuple):
    """`reserved`: ids that an answer must not have before its grammar begins."""

    tokenizer: LLTokenizer
    eos_token_ids: tuple[int, ...]
    reserved: tuple[int, ...]


def grammar_vocabulary(
    tokenizer: Tokenizer, eos_token_ids: Sequence[int] = ()
) -> GrammarVocabulary:
    """Takes about a second for GLM's vocabulary: make it once a process.

    Grammars name control tokens by id, `<[154843]>`. Ids beyond the tokenizer are in no mask.
    """
    eos = tuple(eos_token_ids or tokenizer.eos_token_ids)
    wrapper = TokenizerWrapper(_Vocabulary(tokenizer, eos))
    made = LLTokenizer(wrapper, n_vocab=tokenizer.vocab_size, eos_token=list(eos))
    call = tokenizer.marker_id(markers.CALL)  # it would end the reasoning
    return GrammarVocabulary(made, eos, (*eos, *(() if call is None else (call,))))
