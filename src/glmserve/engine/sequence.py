# SPDX-License-Identifier: Apache-2.0
"""One request inside the engine: what does not change with every step.

While it runs, its length, its newest tokens and what is in flight are in the row table. Long
things are held in compact arrays, so that neither the collector nor a step walks through them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from glmserve.config import PAGE_SIZE
from glmserve.engine.grammar_state import GrammarState
from glmserve.engine.page_pool import KEY_BYTES, ROOT, chain_key
from glmserve.messages import IntArray, Request, RowInit, Shaping, TokenLogprobs


@dataclass(eq=False)
class Sequence:
    request: Request
    seed: int  # 64 bits, drawn when the request brought none
    max_tokens: int
    order: tuple[int, int]  # (priority, arrival): lower goes first
    deadline: float  # time.monotonic() at which it is ended
    arrived: float = 0.0  # time.monotonic()
    queued: float = 0.0  # seconds from its arrival until it was admitted
    row: int = -1  # device row while running
    pages: array[int] = field(default_factory=lambda: array("i"))  # physical, in logical order
    published: int = 0  # leading pages that others can find
    cached: int = 0  # tokens that the first admission found in the prefix cache
    prefilled: int = 0  # tokens of the context that are cached or planned for prefill
    output: array[int] = field(default_factory=lambda: array("i"))  # confirmed; lags while running
    grammar: GrammarState | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # not sent yet
    refused_at: int = -1  # free pages when they were last too few to admit it
    context: IntArray = field(init=False)  # tokens to prefill: the prompt, and output if preempted
    _keys: bytearray = field(default_factory=bytearray)  # of leading full pages, as far as needed

    def __post_init__(self) -> None:
        self.context = self.request.prompt

    @property
    def uid(self) -> str:
        return self.request.uid

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt)

    @property
    def limit(self) -> int:
        """Length at which max_tokens is reached."""
        return self.prompt_length + self.max_tokens

    @property
    def ready(self) -> bool:
        """Its grammar, if any, has been built: it may be given a row."""
        return self.grammar is None or self.grammar.built

    def stop_token_ids(self, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Ids that end it. A grammar's end is the answer's end, so eos cannot be ignored there."""
        s = self.request.sampling
        eos = () if s.ignore_eos and s.grammar is None else eos_token_ids
        return tuple(dict.fromkeys((*eos, *s.stop_token_ids)))

    def row_init(self, eos_token_ids: tuple[int, ...]) -> RowInit:
        """What the ranks need to know of this sequence when it takes its row."""
        s = self.request.sampling
        return RowInit(
            row=self.row,
            seed=self.seed,
            temperature=s.temperature,
            top_p=s.top_p,
            top_k=s.top_k,
            remaining=self.limit - len(self.context),
            stop_token_ids=self.stop_token_ids(eos_token_ids),
            min_p=s.min_p,
            # Masks do this with a grammar, so that its end is not shut.
            stops_from=0 if s.grammar is not None else self.prompt_length + s.min_tokens,
            logprobs=s.logprobs,
            prompt_logprobs=None if self.output else s.prompt_logprobs,
            prompt_length=self.prompt_length,
            draft_script=self.request.draft_script,
            shaping=self._shaping(),
            grammar=s.grammar is not None,
        )

    def _shaping(self) -> Shaping | None:
        s = self.request.sampling
        penalties = (s.presence_penalty, s.frequency_penalty, s.repetition_penalty)
        others = (s.logit_bias, s.allowed_token_ids, s.bad_word_ids)
        if penalties == (0.0, 0.0, 1.0) and others == ((), None, ()):
            return None
        output = np.array(self.output, dtype=np.int32)
        return Shaping(*penalties, *others, prompt=self.request.prompt, output=output)

    def restart(self) -> None:
        """The context, output included, is to be computed again."""
        output = np.array(self.output, dtype=np.int32)
        self.context = np.concatenate([self.request.prompt, output])

    def forget_pages(self) -> None:
        """Its pages have been given back."""
        self.pages = array("i")
        self.prefilled = self.published = 0

    def page_keys(self, first: int, end: int) -> Iterator[bytes]:
        """Keys of the pages [first, end), which confirmed tokens fill. They never change.

        Those before `first` have been asked for earlier.
        """
        for page in range(first, end):
            at = page * KEY_BYTES
            if at == len(self._keys):
                parent = bytes(self._keys[-KEY_BYTES:]) or ROOT
                self._keys += chain_key(parent, self._page_tokens(page))
            yield bytes(self._keys[at : at + KEY_BYTES])

    def _page_tokens(self, page: int) -> IntArray:
        prompt, start = self.request.prompt, page * PAGE_SIZE
        end = start + PAGE_SIZE
        if end <= len(prompt):
            return prompt[start:end]
        first = max(0, start - len(prompt))
        output = np.array(self.output[first : end - len(prompt)], dtype=np.int32)
        return np.concatenate([prompt[start:], output])
