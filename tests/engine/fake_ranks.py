# SPDX-License-Identifier: Apache-2.0
"""Ranks without a model: they obey the plan protocol and check it.

The "model" is a hash of the whole context, read back through the page table from a pretended
cache, so a wrong page, a missed chunk or a reused row changes the tokens. Accepted drafts are
random; they never change what is generated, only how much of it a step confirms. A row with a
grammar gives the first allowed token from the hash's on, and is confirmed along real drafts.
"""

from __future__ import annotations

import random
from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from glmserve.config import PAGE_SIZE, EngineConfig
from glmserve.messages import (
    EXHAUSTED,
    GOES_ON,
    STOPPED,
    RowInit,
    RowReport,
    StepMasks,
    StepPlan,
    StepResult,
    decode,
    encode,
)

VOCAB = 97


Bits = npt.NDArray[np.uint32]


def next_token(context: list[int], allowed: Bits | None = None) -> int:
    """`allowed`: a grammar's mask; the next allowed id, with wrap-around."""
    value = 17
    for token in context:
        value = (value * 31 + token + 7) % 1_000_003
    if allowed is not None:
        while not allowed[value % VOCAB // 32] >> np.uint32(value % VOCAB % 32) & 1:
            value += 1
    return value % VOCAB


def expected_output(prompt: list[int], max_tokens: int, stops: tuple[int, ...]) -> list[int]:
    """What one request gives when it runs alone."""
    context, output = list(prompt), []
    while len(output) < max_tokens:
        output.append(next_token(context))
        context.append(output[-1])
        if output[-1] in stops:
            break
    return output


class Output(NamedTuple):
    """What one row has drawn in a step."""

    row: int
    tokens: list[int]
    ended: int = GOES_ON
    drafts: tuple[int, ...] = ()


def step_result(step: int, outputs: list[Output], computed: int = 0) -> StepResult:
    """The result's columns."""
    return StepResult(
        step,
        np.array([out.row for out in outputs], dtype=np.int32),
        np.array([len(out.tokens) for out in outputs], dtype=np.int32),
        np.array([token for out in outputs for token in out.tokens], dtype=np.int32),
        np.array([out.ended for out in outputs], dtype=np.uint8),
        {out.row: RowReport(drafts=out.drafts) for out in outputs if out.drafts},
        computed,
    )


class FakeRanks:
    """A `Ranks` whose results are ready at once but are read in order."""

    def __init__(self, config: EngineConfig, seed: int = 0) -> None:
        self.config = config
        self.random = random.Random(seed)
        self.results: deque[bytes] = deque()
        self.plans: list[StepPlan] = []
        self.computed = 0  # prefill rows so far
        self.cache = [-1] * (config.num_pages * PAGE_SIZE)
        self.tables: dict[int, list[int]] = {}
        self.rows: dict[int, RowInit] = {}
        self.length: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.remaining: dict[int, int] = {}
        self.drafts: dict[int, tuple[int, ...]] = {}  # of rows with a grammar
        self.held: StepPlan | None = None  # waits for its masks
        self.masks: dict[int, Bits] = {}  # of the step that runs

    def send(self, data: bytes, timeout: float | None = None) -> None:
        message = decode(data)
        if isinstance(message, StepMasks):
            assert self.held is not None and message.step == self.held.step
            self.masks |= zip(message.rows, message.masks, strict=True)
            if not message.more:
                self.results.append(encode(self._run(self.held)))
                self.held, self.masks = None, {}
            return
        assert isinstance(message, StepPlan) and self.held is None
        self.plans.append(message)
        if message.masks_follow:
            self.held = message
        else:
            self.results.append(encode(self._run(message)))

    def recv(self, timeout: float | None = None) -> bytes:
        return self.results.popleft()

    def _run(self, plan: StepPlan) -> StepResult:
        for init in plan.admit:
            self.rows[init.row] = init
            self.tables[init.row] = []
            self.drafts.pop(init.row, None)
            self.length[init.row] = 0
            self.remaining[init.row] = init.remaining
            self.last[init.row] = -1
        for grant in plan.grants:
            assert grant.start == len(self.tables[grant.row])
            self.tables[grant.row] += grant.pages.tolist()
            assert len(self.tables[grant.row]) <= self.config.pages_per_row
        outputs = []
        assert len(set(plan.decode)) == len(plan.decode)
        for row in plan.decode:
            if self.last[row] < 0:
                continue  # ended meanwhile
            outputs.append(self._generate(row, 1 + self.random.randint(0, self.config.drafts)))
        computed = 0
        for chunk in plan.prefill:
            if chunk.resumed:
                assert chunk.start > 0 and chunk.start % PAGE_SIZE == 0
                self.length[chunk.row] = chunk.start
            assert chunk.start == self.length[chunk.row]
            for offset in range(chunk.length):
                self._write(chunk.row, chunk.start + offset, int(chunk.tokens[offset]))
            computed += chunk.length
            self.length[chunk.row] = chunk.start + chunk.length
            if chunk.final:
                outputs.append(self._generate(chunk.row, 1))
        assert computed <= self.config.chunk
        self.computed += computed
        return step_result(plan.step, outputs, computed)

    def _slot(self, row: int, position: int) -> int:
        return self.tables[row][position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE

    def _write(self, row: int, position: int, token: int) -> None:
        self.cache[self._slot(row, position)] = token

    def _generate(self, row: int, count: int) -> Output:
        init, tokens = self.rows[row], []
        assert init.grammar == (row in self.masks)
        drafts = self.drafts.pop(row, ())
        if init.grammar:
            count = len(drafts) + 1
        if self.last[row] >= 0:
            self._write(row, self.length[row] - 1, self.last[row])
            # Everything that the step may write ahead must have a page as well.
            self._slot(row, self.length[row] - 1 + self.config.lookahead)
        stopped = False
        for place in range(min(count, self.remaining[row])):
            context = [self.cache[self._slot(row, p)] for p in range(self.length[row])]
            token = next_token(context, self.masks[row][place] if init.grammar else None)
            tokens.append(token)
            if self.config.drafts:  # the next one of this step sees it
                self._write(row, self.length[row], token)
            self.length[row] += 1
            self.remaining[row] -= 1
            self.last[row] = token
            stopped = token in init.stop_token_ids
            if stopped or not self.config.drafts:
                break
            if place < len(drafts) and token != drafts[place]:
                break  # the draft is rejected
        exhausted = self.remaining[row] == 0 and not stopped
        if stopped or exhausted:
            self.last[row] = -1
        if init.grammar and self.last[row] >= 0:
            self.drafts[row] = self._draft(row)
        ended = STOPPED if stopped else EXHAUSTED if exhausted else GOES_ON
        return Output(row, tokens, ended, self.drafts.get(row, ()))

    def _draft(self, row: int) -> tuple[int, ...]:
        """Often what the hash would give among a few ids that grammars of tests like."""
        few = np.zeros(-(-VOCAB // 32), dtype=np.uint32)
        for token in (3, 5, 6, 7, 65, 66):
            few[token // 32] |= np.uint32(1 << token % 32)
        context = [self.cache[self._slot(row, p)] for p in range(self.length[row] - 1)]
        context.append(self.last[row])
        drafts: list[int] = []
        for _ in range(self.config.drafts):
            likely = next_token(context + drafts, few)
            drafts.append(likely if self.random.random() < 0.8 else self.random.randrange(VOCAB))
        return tuple(drafts)
