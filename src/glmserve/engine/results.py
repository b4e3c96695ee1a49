# SPDX-License-Identifier: Apache-2.0
"""Takes the results of steps in: tokens, full pages, grammars, ends.

Rows are handled in columns; a sequence is looked at only when a page fills, when it ends, or when
it has a grammar or log-probabilities. Not its job: what to compute next (`planning`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from glmserve.engine.roster import Roster
from glmserve.engine.sequence import Sequence
from glmserve.engine.stats import StatsCollector
from glmserve.messages import (
    STOPPED,
    Ended,
    FinishReason,
    IntArray,
    RowReport,
    StepPlan,
    StepResult,
    Update,
)


class ResultIntake:
    """Applies results in the order of their plans."""

    def __init__(self, roster: Roster, stats: StatsCollector) -> None:
        self._roster, self._stats = roster, stats

    def apply(self, result: StepResult, plan: StepPlan) -> Update:
        """Takes a step's result in; returns what the client is to know."""
        roster, table = self._roster, self._roster.table
        assert result.step == plan.step == roster.done_step + 1, (result.step, plan.step)
        roster.done_step = result.step
        self._stats.stepped(plan, result)
        table.in_flight[list(plan.decode)] -= 1
        for chunk in plan.prefill:
            table.in_flight[chunk.row] -= chunk.final
            roster.publish(roster.by_row[chunk.row], chunk.start + chunk.length)
        started, roster.started = tuple(roster.started), []
        ended: list[Ended] = []
        reports: dict[int, RowReport] = {}
        if result.reports or table.grammar[result.rows].any():
            reports = self._reports(result)
            self._follow(result, ended)
        # Those that were cancelled meanwhile, or whose grammar failed, get nothing more.
        rows, counts, tokens, ends = _of_living(result, table.live[result.rows])
        table.append(rows, counts, tokens)
        # The last token is not in the caches, so a page is confirmed by one token more.
        for row in rows[table.length[rows] > table.page_end[rows]].tolist():
            roster.publish(roster.by_row[row], int(table.length[row]) - 1)
        last = counts.cumsum() - 1
        for index in ends.nonzero()[0].tolist():
            sequence = roster.by_row[int(rows[index])]
            stop = int(tokens[last[index]]) if ends[index] == STOPPED else None
            ended.append(self._end(sequence, stop))
        roster.release_ended()
        return Update(started, rows, counts, tokens, reports, tuple(ended))

    def _end(self, sequence: Sequence, stop: int | None) -> Ended:
        reason: FinishReason = "length" if stop is None else "stop"
        self._stats.finished(reason)
        self._roster.end(sequence)
        return Ended(sequence.uid, reason, sequence.prompt_length, stop_token=stop)

    def _follow(self, result: StepResult, ended: list[Ended]) -> None:
        """Moves grammars on; ends a sequence with an error where that fails."""
        table, start = self._roster.table, 0
        columns = zip(result.rows.tolist(), result.counts.tolist(), strict=True)
        for row, count in columns:
            ids = result.tokens[start : start + count].tolist()
            start += count
            if not (table.grammar[row] and table.live[row]):
                continue
            sequence = self._roster.by_row[row]
            grammar = sequence.grammar
            assert grammar is not None
            grammar.advance(ids, result.reports.get(row, RowReport()).drafts)
            if grammar.error:
                self._stats.finished("error")
                self._roster.end(sequence)
                ended.append(
                    Ended(
                        sequence.uid, "error", sequence.prompt_length, grammar.error, "INVALID_ARG"
                    )
                )

    def _reports(self, result: StepResult) -> dict[int, RowReport]:
        """What the rows report to the client; those of prompts wait for the first tokens."""
        drew = set(result.rows.tolist())
        reports = {}
        for row, report in result.reports.items():
            if not self._roster.table.live[row]:
                continue
            sequence = self._roster.by_row[row]
            sequence.prompt_logprobs += report.prompt_logprobs
            if row in drew and (report.logprobs or sequence.prompt_logprobs):
                reports[row] = RowReport(report.logprobs, sequence.prompt_logprobs)
                sequence.prompt_logprobs = ()
        return reports


def _of_living(
    result: StepResult, live: npt.NDArray[np.bool_]
) -> tuple[IntArray, IntArray, IntArray, npt.NDArray[np.uint8]]:
    """The columns rows, counts, tokens and ended of the rows that are `live`."""
    if live.all():
        return result.rows, result.counts, result.tokens, result.ended
    tokens = result.tokens[live.repeat(result.counts)]
    return result.rows[live], result.counts[live], tokens, result.ended[live]
