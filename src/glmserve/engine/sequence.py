# SPDX-License-Identifier: Apache-2.0
"""One request inside the engine. Confirmed facts only change when a step's result arrives.

While steps are in flight the host does not know how many tokens they will confirm; the
properties give the bounds that planning needs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from glmserve.config import PAGE_SIZE
from glmserve.engine.grammar_state import Grammars, GrammarState
from glmserve.engine.page_pool import ROOT, chain_key
from glmserve.messages import (
    Chunk,
    FinishReason,
    IntArray,
    Request,
    RowInit,
    RowOutput,
    Shaping,
    TokenLogprobs,
)

_NOTHING = RowOutput(-1, ())


@dataclass(eq=False)
class Sequence:
    request: Request
    seed: int  # 64 bits, drawn when the request brought none
    max_tokens: int
    order: tuple[int, int]  # (priority, arrival): lower goes first
    deadline: float  # time.monotonic() at which it is ended
    arrived: float = 0.0  # time.monotonic()
    queued: float = 0.0  # seconds from its arrival until it was admitted
    output: list[int] = field(default_factory=list)  # confirmed tokens
    pages: list[int] = field(default_factory=list)  # physical, in logical order
    row: int = -1  # device row while running
    published: int = 0  # leading pages that others can find
    cached: int = 0  # tokens that the first admission found in the prefix cache
    prefilled: int = 0  # tokens of the context that are cached or planned for prefill
    sampling_steps: int = 0  # steps in flight that sample this sequence
    last_step: int = -1  # newest step whose plan names the row
    finish_reason: FinishReason | None = None
    error: str = ""  # why, where the reason does not say it
    error_code: str = ""
    grammar: GrammarState | None = None
    chunks_sent: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # not sent yet
    keys: list[bytes] = field(default_factory=list)  # of leading full pages, as far as needed
    context: IntArray = field(init=False)  # tokens to prefill: the prompt, and output if preempted
    # Plain numbers, because planning reads them for every row of every step.
    uid: str = field(init=False)
    context_length: int = field(init=False)
    prompt_length: int = field(init=False)
    length: int = field(init=False)  # confirmed tokens, prompt and output
    limit: int = field(init=False)  # length at which max_tokens is reached

    def __post_init__(self) -> None:
        self.uid = self.request.uid
        self.context = self.request.prompt
        self.context_length = self.prompt_length = self.length = len(self.context)
        self.limit = self.prompt_length + self.max_tokens

    @property
    def prefilling(self) -> bool:
        return self.prefilled < self.context_length

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def stop_token_ids(self, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Ids that end it. A grammar's end is the answer's end, so eos cannot be ignored there."""
        s = self.request.sampling
        eos = () if s.ignore_eos and s.grammar is None else eos_token_ids
        return tuple(dict.fromkeys((*eos, *s.stop_token_ids)))

    def start_grammar(self, grammars: Grammars | None, eos_token_ids: tuple[int, ...]) -> None:
        """Begins to follow the request's grammar, if it has one."""
        s = self.request.sampling
        if s.grammar is not None:
            assert grammars is not None
            stops = self.stop_token_ids(eos_token_ids)
            self.grammar = grammars.start(s.grammar, s.grammar_after, stops)

    def row_init(self, eos_token_ids: tuple[int, ...]) -> RowInit:
        """What the ranks need to know of this sequence when it takes its row."""
        s = self.request.sampling
        return RowInit(
            row=self.row,
            seed=self.seed,
            temperature=s.temperature,
            top_p=s.top_p,
            top_k=s.top_k,
            remaining=self.limit - self.length,
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
        output = np.asarray(self.output, dtype=np.int32)
        return Shaping(*penalties, *others, prompt=self.request.prompt, output=output)

    def restart(self) -> None:
        """Forgets the row and its pages: the context is computed again from the start."""
        self.context = np.concatenate(
            [self.request.prompt, np.asarray(self.output, dtype=np.int32)]
        )
        self.context_length = len(self.context)
        self.pages, self.row = [], -1
        self.prefilled = self.published = 0

    def page_keys(self, count: int) -> list[bytes]:
        """Keys of the first `count` pages, which confirmed tokens fill. They never change."""
        for page in range(len(self.keys), count):
            parent = self.keys[-1] if self.keys else ROOT
            self.keys.append(
                chain_key(parent, self._tokens(page * PAGE_SIZE, (page + 1) * PAGE_SIZE))
            )
        return self.keys[:count]

    def _tokens(self, start: int, end: int) -> IntArray:
        """Confirmed tokens [start, end) of prompt and output."""
        prompt = self.request.prompt
        if end <= len(prompt):
            return prompt[start:end]
        first = max(0, start - len(prompt))
        output = np.asarray(self.output[first : end - len(prompt)], dtype=np.int32)
        return np.concatenate([prompt[start:], output])

    def chunk(self, out: RowOutput | None = None) -> Chunk:
        """The next chunk to send; carries the finish reason when the sequence has ended."""
        prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        if self.prompt_logprobs:
            prompt_logprobs, self.prompt_logprobs = tuple(self.prompt_logprobs), []
        number = self.chunks_sent
        self.chunks_sent = number + 1
        _, tokens, stopped, _, _, logprobs, _, _ = out or _NOTHING
        return Chunk(
            self.uid,
            number,
            tokens,
            self.finish_reason,
            self.prompt_length,
            self.length - self.prompt_length,
            self.cached,
            logprobs,
            prompt_logprobs,
            self.error,
            self.error_code,
            tokens[-1] if stopped else None,
            self.queued,
        )
