# SPDX-License-Identifier: Apache-2.0
"""Turns the engine's updates into the chunks of each request, at the client's end.

It remembers what an update does not repeat: whose row it is, how many tokens there were. Done
here, this work is not on the engine's core.
"""

from __future__ import annotations

from glmserve.messages import Chunk, Ended, RowReport, Started, Update

_NOTHING = RowReport()


class _Answer:
    """One request so far."""

    __slots__ = ("number", "output", "started")

    def __init__(self, started: Started) -> None:
        self.started = started
        self.number = 0  # of its next chunk
        self.output = 0  # tokens

    def chunk(
        self, tokens: tuple[int, ...], ended: Ended | None, report: RowReport = _NOTHING
    ) -> Chunk:
        started, number = self.started, self.number
        self.number = number + 1
        self.output += len(tokens)
        reason, error, code, stop = None, "", "", None
        if ended is not None:
            _, reason, _, error, code, stop = ended
        return Chunk(
            started.uid,
            number,
            tokens,
            reason,
            started.num_prompt_tokens,
            self.output,
            started.num_cached_tokens,
            report.logprobs,
            report.prompt_logprobs,
            error,
            code,
            stop,
            started.queued,
        )


class ChunkReader:
    """Reads the updates of one engine, in order."""

    def __init__(self) -> None:
        self._answers: dict[str, _Answer] = {}  # of requests that have had a row
        self._rows: dict[int, _Answer] = {}

    def read(self, update: Update) -> list[Chunk]:
        """The update's chunks, one a request at most."""
        for started in update.started:
            answer = self._answers.setdefault(started.uid, _Answer(started))
            self._rows[started.row] = answer
        ended = {end.uid: end for end in update.ended}
        reports = update.reports
        tokens, position = update.tokens.tolist(), 0
        chunks = []
        for row, count in zip(update.rows.tolist(), update.counts.tolist(), strict=True):
            answer = self._rows[row]
            ids = tuple(tokens[position : position + count])
            position += count
            end = ended.pop(answer.started.uid, None) if ended else None
            chunks.append(answer.chunk(ids, end, reports.get(row, _NOTHING)))
        for end in ended.values():
            never = Started(-1, end.uid, end.num_prompt_tokens, 0, 0.0)
            chunks.append(self._answers.get(end.uid, _Answer(never)).chunk((), end))
        for end in update.ended:
            self._answers.pop(end.uid, None)
        return chunks
