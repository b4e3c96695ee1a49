# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: turns queued requests and free pages into step plans.

A plan is made without waiting for the steps in flight (DESIGN §3.1), so it reserves the pages
that they may need at most. Not its job: the state that it works on (`roster`), results.
"""

from __future__ import annotations

from itertools import islice

import numpy as np
import numpy.typing as npt

from glmserve.config import PAGE_SIZE, EngineConfig
from glmserve.engine.roster import Roster
from glmserve.engine.sequence import Sequence
from glmserve.engine.stats import StatsCollector
from glmserve.messages import PageGrant, PrefillChunk, RowInit, StepPlan

# Ids that a plan's new rows may bring along for penalties and the like before it takes no more of
# them: with a last row of a million they stay below `launcher.RING_BYTES`.
_SHAPING_IDS = 1 << 18


class Planner:
    """Decides what the next step computes."""

    def __init__(
        self,
        config: EngineConfig,
        eos_token_ids: tuple[int, ...],
        roster: Roster,
        stats: StatsCollector,
    ) -> None:
        self._config, self._eos_token_ids = config, eos_token_ids
        self._roster, self._stats = roster, stats
        self._each = config.drafts + 1  # tokens that a step confirms at most

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None when there is nothing to compute now.

        `now` is time.monotonic(), for the time that requests were queued.
        """
        roster, table = self._roster, self._roster.table
        grants: list[PageGrant] = []
        preemptions = roster.preemptions
        decode = self._plan_decode(grants)
        if decode is None:  # out of pages, and the newest state is not known yet
            return None
        admit: list[RowInit] = []
        # What was preempted for want of pages must not come back in the same step.
        starved = roster.preemptions > preemptions
        prefill = self._plan_prefill(grants, admit, self._prefill_budget(len(decode)), starved, now)
        if not len(decode) and not prefill:
            if roster.busy or not roster.running:
                return None
            # Half-read prompts hold every page and none can go on: the last one gives way.
            assert len(roster.running) > 1, "the pool is too small for one sequence"
            self._preempt(roster.running[-1], grants)
            return self.plan(now)
        step, roster.next_step = roster.next_step, roster.next_step + 1
        finals = [chunk.row for chunk in prefill if chunk.final]
        for rows in (decode, finals):
            table.in_flight[rows] += 1
        for rows in (decode, [chunk.row for chunk in prefill]):
            table.last_step[rows] = step
        masked = bool(table.grammar[decode].any() or table.grammar[finals].any())
        going = tuple(decode.tolist())
        return StepPlan(step, tuple(admit), tuple(grants), tuple(prefill), going, masked)

    def _plan_decode(self, grants: list[PageGrant]) -> npt.NDArray[np.intp] | None:
        """Rows that decode in this step, ascending; None when pages lack until results arrive."""
        table = self._roster.table
        in_flight = table.in_flight
        # The steps in flight reach max_tokens even if each confirms one token; a grammar's masks
        # need every token before them.
        ready = table.decoding & (table.length + in_flight < table.limit)
        ready &= ~(table.grammar & (in_flight > 0))
        known = np.minimum(table.length + in_flight * self._each, table.limit)
        slots = known + self._config.lookahead
        short = ready & (slots > table.slots)
        if short.any():
            self._grow_decoding(ready, slots, short.nonzero()[0].tolist(), grants)
            if not ready.any() and self._roster.busy:
                return None
        return ready.nonzero()[0]

    def _grow_decoding(
        self,
        ready: npt.NDArray[np.bool_],
        slots: npt.NDArray[np.int64],
        rows: list[int],
        grants: list[PageGrant],
    ) -> None:
        """Gives pages to `rows` that need `slots`; clears `ready` where there are none."""
        roster = self._roster
        for sequence in sorted((roster.by_row[row] for row in rows), key=lambda s: s.order):
            # While its row is -1 it has been preempted, for an older one or itself.
            while sequence.row >= 0 and not self._grow(sequence, slots[sequence.row], grants):
                if roster.busy:
                    # Preempting needs confirmed tokens. Until they are known, those ahead of it
                    # go on and nobody behind it does.
                    ready[[behind.row for behind in roster.from_on(sequence)]] = False
                    return
                self._preempt(roster.running[-1], grants)
        ready &= roster.table.decoding  # those that were preempted do not decode

    def _prefill_budget(self, decoding: int) -> int:
        """Prompt tokens of a step: what decoding leaves of `chunk`, but a quarter at least.

        Decoding rows never wait for prompts, and prompts are never shut out by them.
        """
        chunk = self._config.chunk
        return max(chunk - decoding * self._each, -(-chunk // 4))

    def _plan_prefill(
        self,
        grants: list[PageGrant],
        admit: list[RowInit],
        budget: int,
        starved: bool,
        now: float,
    ) -> list[PrefillChunk]:
        roster, table = self._roster, self._roster.table
        chunks: list[PrefillChunk] = []
        begun: list[Sequence] = []
        brought = 0  # ids of `admit`, beside the chunks'
        if (table.live & ~table.decoding).any():
            begun = [s for s in roster.running if not table.decoding[s.row]]
        while budget > 0:
            entering = [] if starved else self._entering(2)
            if not begun and not entering:
                break
            enters = not begun
            sequence = entering.pop(0) if enters else begun.pop(0)
            if enters and (brought > _SHAPING_IDS or not self._match(sequence)):
                break
            start = sequence.prefilled
            # A long prompt leaves half of the step to those behind it.
            share = -(-budget // 2) if begun or entering else budget
            length = min(share, len(sequence.context) - start)
            if not self._grow(sequence, start + length + self._config.lookahead, grants):
                if enters:
                    self._unmatch(sequence)
                break
            if enters:
                admit.append(init := self._admit(sequence, grants, now))
                brought += init.shaping.ids if init.shaping else 0
            end = start + length
            tokens = sequence.context[start : end + 1]
            resumed = enters and start > 0
            chunks.append(PrefillChunk(sequence.row, start, length, tokens, resumed))
            sequence.prefilled = end
            table.decoding[sequence.row] = end == len(sequence.context)
            budget -= length
        return chunks

    def _entering(self, count: int) -> list[Sequence]:
        """The first waiting sequences that could be admitted, `count` of them at most."""
        if not self._roster.has_free_row:
            return []
        return list(islice(self._roster.candidates(), count))

    def _match(self, sequence: Sequence) -> bool:
        """Takes what the prefix cache has of the context; one page table serves every cache.

        The context's last token is always computed: its logits are wanted. False where nothing
        was freed since the sequence last found no room: a long prefix is not looked up in vain.
        """
        pool = self._roster.pool
        if pool.free <= sequence.refused_at:
            return False
        if sequence.request.sampling.prompt_logprobs is None or sequence.output:
            # Otherwise every row of the prompt is needed.
            keys = sequence.page_keys(0, (len(sequence.context) - 1) // PAGE_SIZE)
            sequence.pages = pool.match(keys)
            sequence.published = len(sequence.pages)
            sequence.prefilled = len(sequence.pages) * PAGE_SIZE
        return True

    def _unmatch(self, sequence: Sequence) -> None:
        pool = self._roster.pool
        pool.release(sequence.pages)
        sequence.forget_pages()
        sequence.refused_at = pool.free

    def _admit(self, sequence: Sequence, grants: list[PageGrant], now: float) -> RowInit:
        if not sequence.output:
            sequence.cached = sequence.prefilled
            sequence.queued = now - sequence.arrived
        sequence.refused_at = -1
        self._stats.admitted(sequence.prefilled)
        self._roster.enter(sequence)
        grants.append(PageGrant(sequence.row, 0, np.array(sequence.pages, dtype=np.int32)))
        return sequence.row_init(self._eos_token_ids)

    def _grow(self, sequence: Sequence, slots: int, grants: list[PageGrant]) -> bool:
        """Makes the pages of `sequence` hold `slots` tokens; False when there are too few."""
        held = len(sequence.pages)
        need = -(-int(slots) // PAGE_SIZE) - held
        if need <= 0:
            return True
        pages = self._roster.pool.allocate(need)
        if pages is None:
            return False
        if sequence.row >= 0:  # the grant of one that is being admitted follows with its row
            grants.append(PageGrant(sequence.row, held, pages))
        self._roster.grow(sequence, pages)
        return True

    def _preempt(self, sequence: Sequence, grants: list[PageGrant]) -> None:
        grants[:] = [grant for grant in grants if grant.row != sequence.row]
        self._roster.preempt(sequence)
