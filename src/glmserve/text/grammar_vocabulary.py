# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's vocabulary as llguidance wants it: bytes of every id, and which are control.

Used where grammars are checked (preprocess) and where they are followed (the engine), so both
mean the same ids. llguidance is imported nowhere else but there and loads no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLTokenizer, TokenizerWrapper

from glmserve.text.tokenizer import Tokenizer

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


def grammar_tokenizer(tokenizer: Tokenizer, eos_token_ids: Sequence[int] = ()) -> LLTokenizer:
    """Takes about a second for GLM's vocabulary: make it once a process.

    Grammars name control tokens by id, `<[154843]>`. Ids beyond the tokenizer are in no mask.
    """
    eos = list(eos_token_ids or tokenizer.eos_token_ids)
    vocabulary = TokenizerWrapper(_Vocabulary(tokenizer, eos))
    return LLTokenizer(vocabulary, n_vocab=tokenizer.vocab_size, eos_token=eos)
