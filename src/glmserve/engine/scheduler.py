# SPDX-License-Identifier: Apache-2.0
"""The engine's decisions behind one door: requests in, plans out, results in, updates out.

`planning` decides what a step computes, `results` takes in what it gave, both over one `roster`.
Not its job: sockets, rings, waiting.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator

from glmserve.config import EngineConfig
from glmserve.engine.grammar_state import Grammars, step_masks
from glmserve.engine.planning import Planner
from glmserve.engine.results import ResultIntake
from glmserve.engine.roster import Roster
from glmserve.engine.sequence import Sequence
from glmserve.engine.stats import StatsCollector
from glmserve.messages import (
    Ended,
    EngineStats,
    Request,
    StepMasks,
    StepPlan,
    StepResult,
    Update,
)


class Scheduler:
    """Owns every request from arrival to its end. One thread uses it."""

    def __init__(
        self,
        config: EngineConfig,
        eos_token_ids: tuple[int, ...],
        grammars: Grammars | None = None,
    ) -> None:
        self.config = config
        self.grammars = grammars
        self.eos_token_ids = eos_token_ids
        self.roster = Roster(config)
        self.stats = StatsCollector(config)
        self._planner = Planner(config, eos_token_ids, self.roster, self.stats)
        self._intake = ResultIntake(self.roster, self.stats)
        self._arrivals = 0
        self._next_deadline = math.inf
        self._now = 0.0  # time.monotonic() when requests were last looked at

    def add(self, request: Request, now: float = 0.0) -> Ended | None:
        """Queues a checked request. Returns its end with an error instead when the queue is full.

        `now` is time.monotonic(), for deadlines.
        """
        waiting = len(self.roster.waiting)
        if waiting >= self.config.max_queue:
            reason = f"the queue is full: {waiting} requests are waiting"
            return Ended(request.uid, "error", len(request.prompt), reason, "UNAVAILABLE")
        assert not self.knows(request.uid), request.uid
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
        self._start_grammar(sequence)
        self._next_deadline = min(self._next_deadline, sequence.deadline)
        self.stats.arrived(len(request.prompt))
        self.roster.add(sequence)
        return None

    def _start_grammar(self, sequence: Sequence) -> None:
        """Begins to follow the request's grammar, if it has one."""
        s = sequence.request.sampling
        if s.grammar is not None:
            assert self.grammars is not None
            stops = sequence.stop_token_ids(self.eos_token_ids)
            sequence.grammar = self.grammars.start(s.grammar, s.grammar_after, stops)

    def knows(self, uid: str) -> bool:
        return uid in self.roster.by_uid

    def cancel(self, uid: str | None, error: str = "") -> list[Ended]:
        """Ends `uid` (None: every request) now; its row and pages follow when no step names it."""
        uids = list(self.roster.by_uid) if uid is None else [uid]
        ended = []
        for sequence in [self.roster.by_uid[u] for u in uids if self.knows(u)]:
            self.stats.finished("abort")
            self.roster.end(sequence)
            ended.append(Ended(sequence.uid, "abort", sequence.prompt_length, error))
        return ended

    def expire(self, now: float) -> list[Ended]:
        """Ends the requests whose deadline has passed, with what they have so far."""
        ended: list[Ended] = []
        self._now = now
        if now < self._next_deadline:
            return ended
        for sequence in [s for s in self.roster.by_uid.values() if s.deadline <= now]:
            seconds = sequence.request.sampling.deadline
            reason = f"the request's deadline of {seconds:g} s has passed"
            ended += self.cancel(sequence.uid, reason)
        deadlines = (s.deadline for s in self.roster.by_uid.values())
        self._next_deadline = min(deadlines, default=math.inf)
        return ended

    @property
    def idle(self) -> bool:
        return self.roster.idle

    def schedule(self) -> StepPlan | None:
        """Plans the next step, or returns None when there is nothing to compute now."""
        return self._planner.plan(self._now)

    def masks(self, plan: StepPlan) -> Iterator[StepMasks]:
        """What the plan's rows with a grammar may draw; to be called once the plan is sent."""
        by_row = self.roster.by_row
        places = dict.fromkeys(plan.decode, self.config.drafts + 1)
        places |= {chunk.row: 1 for chunk in plan.prefill if chunk.final}
        asked = [
            (row, s.grammar, count, self._still_early(s))
            for row, count in places.items()
            if (s := by_row[row]).grammar is not None
        ]
        return step_masks(plan.step, asked)

    def _still_early(self, sequence: Sequence) -> int:
        """Tokens that a running sequence lacks to its min_tokens."""
        made = int(self.roster.table.length[sequence.row]) - sequence.prompt_length
        return sequence.request.sampling.min_tokens - made

    def apply(self, result: StepResult, plan: StepPlan) -> Update:
        """Takes a step's result in; returns what the client is to know."""
        return self._intake.apply(result, plan)

    def snapshot(self) -> EngineStats:
        """What the engine has done so far, and how full it is."""
        roster = self.roster
        return self.stats.snapshot(
            len(roster.running), len(roster.waiting), roster.pool, roster.preemptions
        )

    def check_integrity(self) -> None:
        """Asserts that pages and rows are accounted for; cheap enough to run whenever idle."""
        self.roster.check_integrity()
