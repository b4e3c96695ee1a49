# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: turns queued requests and free pages into step plans.

A plan is made without waiting for the steps in flight (DESIGN §3.1), so it reserves the pages
that they may need at most and is corrected when their results arrive. Not its job: sockets,
rings, time.
"""

from __future__ import annotations

import math
import secrets
from bisect import insort
from collections.abc import Iterator

import numpy as np

from glmserve.config import PAGE_SIZE, EngineConfig
from glmserve.engine.grammar_state import Grammars, step_masks
from glmserve.engine.page_pool import PagePool
from glmserve.engine.sequence import Sequence
from glmserve.engine.stats import StatsCollector
from glmserve.messages import (
    Chunk,
    EngineStats,
    FinishReason,
    PageGrant,
    PrefillChunk,
    Request,
    RowInit,
    RowOutput,
    StepMasks,
    StepPlan,
    StepResult,
)


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order


class Scheduler:
    """Owns every sequence from arrival to its last chunk. One thread uses it."""

    def __init__(
        self,
        config: EngineConfig,
        eos_token_ids: tuple[int, ...],
        grammars: Grammars | None = None,
    ) -> None:
        self.config = config
        self.grammars = grammars
        self.eos_token_ids = eos_token_ids
        self._lookahead = config.lookahead
        self.pool = PagePool(config.num_pages, config.page_seed)
        self.waiting: list[Sequence] = []  # both in order: (priority, arrival)
        self.running: list[Sequence] = []  # preemption takes from the end
        self._arrivals = 0
        self._next_deadline = math.inf
        self._now = 0.0  # time.monotonic() when requests were last looked at
        self.preemptions = 0
        self.stats = StatsCollector(config.drafts)
        self._by_uid: dict[str, Sequence] = {}
        self._by_row: dict[int, Sequence] = {}
        self._leaving: list[Sequence] = []  # ended, but a step in flight still names their row
        self._free_rows = list(range(config.max_rows - 1, -1, -1))
        self._next_step = 0
        self._done_step = -1

    # -- requests -------------------------------------------------------------------------

    def add(self, request: Request, now: float = 0.0) -> Chunk | None:
        """Queues a checked request. Returns an error chunk instead when the queue is full.

        `now` is time.monotonic(), for deadlines.
        """
        if len(self.waiting) >= self.config.max_queue:
            return Chunk(
                request.uid,
                0,
                finish_reason="error",
                num_prompt_tokens=len(request.prompt),
                error=f"the queue is full: {len(self.waiting)} requests are waiting",
                error_code="UNAVAILABLE",
            )
        assert request.uid not in self._by_uid, request.uid
        max_tokens, seed = request.sampling.max_tokens, request.sampling.seed
        assert max_tokens is not None, "admission.check_request fills it in"
        self._arrivals += 1
        seconds = request.sampling.deadline
        sequence = Sequence(
            request,
            secrets.randbits(64) if seed is None else seed,
            max_tokens,
            order=(request.sampling.priority, self._arrivals),
            deadline=math.inf if seconds is None else now + seconds,
            arrived=now,
        )
        sequence.start_grammar(self.grammars, self.eos_token_ids)
        self._by_uid[request.uid] = sequence
        self._next_deadline = min(self._next_deadline, sequence.deadline)
        self.stats.arrived(len(request.prompt))
        insort(self.waiting, sequence, key=_order)
        return None

    def knows(self, uid: str) -> bool:
        return uid in self._by_uid

    def cancel(self, uid: str | None) -> list[Chunk]:
        """Ends `uid` (None: every request) now; its row and pages follow when no step names it."""
        uids = list(self._by_uid) if uid is None else [uid]
        chunks = []
        for sequence in [self._by_uid[u] for u in uids if u in self._by_uid]:
            if sequence.row < 0:
                self.waiting.remove(sequence)
            self._finish(sequence, "abort")
            chunks.append(sequence.chunk())
        return chunks

    def expire(self, now: float) -> list[Chunk]:
        """Ends the requests whose deadline has passed, with what they have so far."""
        chunks: list[Chunk] = []
        self._now = now
        if now < self._next_deadline:
            return chunks
        for sequence in [s for s in self._by_uid.values() if s.deadline <= now]:
            seconds = sequence.request.sampling.deadline
            sequence.error = f"the request's deadline of {seconds:g} s has passed"
            chunks += self.cancel(sequence.uid)
        self._next_deadline = min((s.deadline for s in self._by_uid.values()), default=math.inf)
        return chunks

    @property
    def idle(self) -> bool:
        return not self._by_uid and not self._leaving

    @property
    def _busy(self) -> bool:  # a step is in flight
        return self._done_step != self._next_step - 1

    # -- planning -------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Plans the next step, or returns None when there is nothing to compute now."""
        grants: list[PageGrant] = []
        preemptions = self.preemptions
        decode = self._plan_decode(grants)
        if decode is None:  # out of pages, and the newest state is not known yet
            return None
        admit: list[RowInit] = []
        # What was preempted for want of pages must not come back in the same step.
        starved = self.preemptions > preemptions
        prefill = self._plan_prefill(grants, admit, self._prefill_budget(len(decode)), starved)
        if not decode and not prefill:
            if self._busy or not (self.running or self.waiting):
                return None
            # Half-read prompts hold every page and none can go on: the last one gives way.
            assert len(self.running) > 1, "the pool is too small for one sequence"
            self._preempt(self.running[-1], grants)
            return self.schedule()
        step, self._next_step = self._next_step, self._next_step + 1
        for sequence in decode:
            sequence.sampling_steps += 1
            sequence.last_step = step
        for chunk in prefill:
            sequence = self._by_row[chunk.row]
            sequence.sampling_steps += chunk.final
            sequence.last_step = step
        rows = tuple(s.row for s in decode)
        masked = any(s.grammar for s in decode) or any(
            chunk.final and self._by_row[chunk.row].grammar for chunk in prefill
        )
        return StepPlan(step, tuple(admit), tuple(grants), tuple(prefill), rows, masked)

    def masks(self, plan: StepPlan) -> Iterator[StepMasks]:
        """What the plan's rows with a grammar may draw; to be called once the plan is sent."""
        places = dict.fromkeys(plan.decode, self.config.drafts + 1)
        places |= {chunk.row: 1 for chunk in plan.prefill if chunk.final}
        asked = [
            (row, s.grammar, count, s.request.sampling.min_tokens - len(s.output))
            for row, count in places.items()
            if (s := self._by_row[row]).grammar is not None
        ]
        return step_masks(plan.step, asked)

    def _plan_decode(self, grants: list[PageGrant]) -> list[Sequence] | None:
        """Rows that decode in this step; None when pages lack until results arrive."""
        each = self.config.drafts + 1  # tokens that a step confirms at most
        planned: list[Sequence] = []
        for sequence in tuple(self.running):
            in_flight = sequence.sampling_steps
            if (
                sequence.prefilled < sequence.context_length
                # The steps in flight reach max_tokens even if each confirms one token.
                or sequence.length + in_flight >= sequence.limit
                # A grammar's masks need every token before them.
                or (in_flight and sequence.grammar is not None)
                or sequence.row < 0  # preempted below, for an older one
            ):
                continue
            longest = sequence.length + in_flight * each
            while not self._grow(sequence, longest, grants):
                if self._busy:
                    # Preempting needs confirmed tokens: plan what fits, or wait for results.
                    return planned or None
                self._preempt(self.running[-1], grants)
                if sequence.row < 0:
                    break
            else:
                planned.append(sequence)
        return planned

    def _prefill_budget(self, decoding: int) -> int:
        """Prompt tokens of a step: what decoding leaves of `chunk`, but a quarter at least.

        Decoding rows never wait for prompts, and prompts are never shut out by them.
        """
        chunk = self.config.chunk
        return max(chunk - decoding * (self.config.drafts + 1), -(-chunk // 4))

    def _plan_prefill(
        self, grants: list[PageGrant], admit: list[RowInit], budget: int, starved: bool
    ) -> list[PrefillChunk]:
        chunks: list[PrefillChunk] = []
        candidates = [s for s in self.running if s.prefilling]
        while budget > 0:
            if candidates:
                sequence = candidates.pop(0)
            elif self.waiting and self._free_rows and not starved:
                sequence = self.waiting[0]
            else:
                break
            enters = sequence.row < 0
            if enters:
                self._match(sequence)
            start = sequence.prefilled
            # A long prompt leaves half of the step to those behind it.
            others = candidates or (self.waiting[int(enters) :] and self._free_rows and not starved)
            share = -(-budget // 2) if others else budget
            length = min(share, sequence.context_length - start)
            if not self._grow(sequence, start + length, grants, silent=enters):
                if enters:
                    self._unmatch(sequence)
                break
            if enters:
                admit.append(self._admit(sequence, grants))
            end = start + length
            tokens = sequence.context[start : end + 1]
            resumed = enters and start > 0
            chunks.append(PrefillChunk(sequence.row, start, length, tokens, resumed))
            sequence.prefilled = end
            budget -= length
        return chunks

    def _match(self, sequence: Sequence) -> None:
        """Takes what the prefix cache has of the context; one page table serves every cache.

        The context's last token is always computed: its logits are wanted.
        """
        if sequence.request.sampling.prompt_logprobs is not None and not sequence.output:
            return  # they need every row of the prompt
        keys = sequence.page_keys((sequence.context_length - 1) // PAGE_SIZE)
        sequence.pages = self.pool.match(keys)
        sequence.published = len(sequence.pages)
        sequence.prefilled = len(sequence.pages) * PAGE_SIZE

    def _unmatch(self, sequence: Sequence) -> None:
        self.pool.release(sequence.pages)
        sequence.restart()

    def _admit(self, sequence: Sequence, grants: list[PageGrant]) -> RowInit:
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=_order)
        if not sequence.output:
            sequence.cached = sequence.prefilled
            sequence.queued = self._now - sequence.arrived
        self.stats.admitted(sequence.prefilled)
        sequence.row = self._free_rows.pop()
        self._by_row[sequence.row] = sequence
        grants.append(PageGrant(sequence.row, 0, np.asarray(sequence.pages, dtype=np.int32)))
        return sequence.row_init(self.eos_token_ids)

    def _grow(
        self, sequence: Sequence, length: int, grants: list[PageGrant], silent: bool = False
    ) -> bool:
        """Makes the pages of `sequence` hold `length` tokens and what a step writes past them."""
        slots = length + self._lookahead
        need = -(-slots // PAGE_SIZE) - len(sequence.pages)
        if need <= 0:
            return True
        pages = self.pool.allocate(need)
        if pages is None:
            return False
        if not silent:  # the grant of a sequence that is being admitted follows with its row
            grants.append(PageGrant(sequence.row, len(sequence.pages), pages))
        sequence.pages.extend(pages.tolist())
        return True

    def _preempt(self, sequence: Sequence, grants: list[PageGrant]) -> None:
        """Takes row and pages back; the sequence is computed again when there is room."""
        self.preemptions += 1
        grants[:] = [grant for grant in grants if grant.row != sequence.row]
        self.running.remove(sequence)
        self._release(sequence)
        sequence.restart()
        insort(self.waiting, sequence, key=_order)

    # -- results --------------------------------------------------------------------------

    def apply(self, result: StepResult, plan: StepPlan) -> list[Chunk]:
        """Takes a step's result in; returns the chunks to send."""
        assert result.step == plan.step == self._done_step + 1, (result.step, plan.step)
        self._done_step = result.step
        self.stats.stepped(plan, result)
        chunks = []
        for row in (*plan.decode, *(chunk.row for chunk in plan.prefill if chunk.final)):
            self._by_row[row].sampling_steps -= 1
        for chunk in plan.prefill:
            self._publish(self._by_row[chunk.row], chunk.start + chunk.length)
        by_row = self._by_row
        for out in result.outputs:  # the hot loop: everything is unpacked once
            row, tokens, stopped, exhausted, _, _, prompt_logprobs, _ = out
            sequence = by_row[row]
            if sequence.finish_reason is not None:
                continue  # cancelled while the step was in flight
            if prompt_logprobs:
                sequence.prompt_logprobs += prompt_logprobs
            if not tokens:
                continue
            if sequence.grammar and not self._follow(sequence, out):
                chunks.append(sequence.chunk())
                continue
            sequence.output += tokens
            sequence.length += len(tokens)
            computed = sequence.length - 1  # the last token is not in the caches
            if computed // PAGE_SIZE > sequence.published:
                self._publish(sequence, computed)
            if stopped:
                self._finish(sequence, "stop")
            elif exhausted:
                self._finish(sequence, "length")
            chunks.append(sequence.chunk(out))
        for sequence in [s for s in self._leaving if s.last_step <= self._done_step]:
            self._leaving.remove(sequence)
            self._release(sequence)
        return chunks

    def _follow(self, sequence: Sequence, out: RowOutput) -> bool:
        """Moves a sequence's grammar on; ends the sequence with an error if that fails."""
        grammar = sequence.grammar
        assert grammar is not None
        grammar.advance(out.token_ids, out.drafts)
        if not grammar.error:
            return True
        sequence.error, sequence.error_code = grammar.error, "INVALID_ARG"
        self._finish(sequence, "error")
        return False

    def _publish(self, sequence: Sequence, computed: int) -> None:
        """Lets others find the pages that `computed` confirmed tokens have filled.

        Slot j of the MTP caches is made from token j and what lies before it, so a page's key
        covers it too (DESIGN §3.3).
        """
        full = computed // PAGE_SIZE
        if full > sequence.published:
            keys = sequence.page_keys(full)
            for page in range(sequence.published, full):
                self.pool.publish(sequence.pages[page], keys[page])
            sequence.published = full

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        self.stats.finished(reason)
        del self._by_uid[sequence.uid]
        if sequence.row < 0:
            return
        self.running.remove(sequence)
        if sequence.last_step <= self._done_step:
            self._release(sequence)
        else:
            self._leaving.append(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.pages)
        self._free_rows.append(sequence.row)
        del self._by_row[sequence.row]
        sequence.pages = []

    def snapshot(self) -> EngineStats:
        """What the engine has done so far, and how full it is."""
        return self.stats.snapshot(
            len(self.running), len(self.waiting), self.pool, self.preemptions
        )

    def check_integrity(self) -> None:
        """Asserts that pages and rows are accounted for; cheap enough to run whenever idle."""
        self.pool.check_integrity(p for s in self._by_row.values() for p in s.pages)
        assert len(self._free_rows) + len(self._by_row) == self.config.max_rows
        assert sorted([*self._free_rows, *self._by_row]) == list(range(self.config.max_rows))
