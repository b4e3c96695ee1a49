# SPDX-License-Identifier: Apache-2.0
"""A step's results on their way to the host: sent by the step, read when they are there.

On CUDA they go to pinned memory (eager steps copy them there, graphs write them: `result_slots`)
and an event follows, so that the next step can be launched first (DESIGN §3.1). Log-probabilities
are read only in steps with a row that asks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from glmserve.kernels.row_state import columns
from glmserve.messages import EXHAUSTED, GOES_ON, STOPPED, RowReport, StepResult, TokenLogprobs
from glmserve.runtime.packing import Places
from glmserve.runtime.reach import Reach


def to_host(x: Tensor) -> Tensor:
    """A host tensor with the values of x, filled when what was launched so far is done."""
    if not x.is_cuda:
        return x
    there = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return there.copy_(x, non_blocking=True)


@dataclass(frozen=True)
class Report:
    """Log-probabilities of some rows: host tensors, and which device row each line is of."""

    rows: Sequence[int]  # [M] device rows
    wanted: Sequence[int]  # [M] alternatives that each one asks for
    own: Tensor  # [M]
    ids: Tensor  # [M, n]
    values: Tensor  # [M, n]

    def entries(self) -> dict[int, tuple[TokenLogprobs, ...]]:
        """By device row, in order."""
        found: dict[int, list[TokenLogprobs]] = {}
        for row, n, value, top, values in zip(
            self.rows,
            self.wanted,
            self.own.tolist(),
            self.ids.tolist(),
            self.values.tolist(),
            strict=True,
        ):
            best = tuple(zip(top[:n], values[:n], strict=True)) if n > 0 else ()
            found.setdefault(row, []).append(TokenLogprobs(value, best))
        return {row: tuple(entries) for row, entries in found.items()}


@dataclass
class Pending:
    """A step that has been launched."""

    step: int
    places: Places
    # Reads [S, columns.result_width(k)] int32 once the step is done; None: nothing drawn.
    results: Callable[[], npt.NDArray[np.int32]] | None
    with_drafts: Collection[int]  # rows whose new drafts are reported
    reach: Reach
    logprobs: Report | None = None
    prompt_logprobs: Report | None = None
    expert_totals: Tensor | None = None  # int64 on the host; None in most steps
    late: bool = False  # see StepResult
    done: torch.cuda.Event | None = field(default=None)

    def mark(self, device: torch.device) -> None:
        """To be called once everything is launched."""
        if device.type == "cuda":
            self.done = torch.cuda.Event()
            self.done.record()

    def wait(self) -> StepResult:
        """The result, once the device has it."""
        if self.done is not None:
            self.done.synchronize()
        totals = None if self.expert_totals is None else self.expert_totals.numpy()
        places = self.places
        decoding = len(places.decode)
        if self.results is None:
            reports = self._reports({}, {})
            return StepResult(
                self.step,
                reports=reports,
                rows_computed=places.prefill_rows,
                late=self.late,
                expert_totals=totals,
            )
        lines = self.results()[: len(places.rows)]  # without padding
        counts = lines[:, columns.COUNT]
        rows = places.drawing
        surplus = places.width - counts[:decoding]
        if surplus.any():
            self.reach.confirm(rows[:decoding], surplus)
        rows_computed = places.width * np.count_nonzero(counts[:decoding]) + places.prefill_rows
        if not counts.all():  # some had ended
            drew = counts > 0
            rows, lines, counts = rows[drew], lines[drew], counts[drew]
        start, end = columns.TOKENS, columns.TOKENS + places.width
        confirmed = np.arange(places.width) < counts[:, None]
        flags = lines[:, columns.FLAGS]
        done = np.where(flags & columns.EXHAUSTED, EXHAUSTED, GOES_ON)
        reports = {}
        if self.with_drafts or self.logprobs or self.prompt_logprobs:
            drafts = {
                row: tuple(line[end:].tolist())
                for row, line in zip(rows.tolist(), lines, strict=True)
                if row in self.with_drafts
            }
            confirms = dict(zip(rows.tolist(), counts.tolist(), strict=True))
            reports = self._reports(confirms, drafts)
        return StepResult(
            self.step,
            rows,
            counts.copy(),
            lines[:, start:end][confirmed],
            np.where(flags & columns.STOPPED, STOPPED, done).astype(np.uint8),
            reports,
            rows_computed,
            self.late,
            totals,
        )

    def _reports(
        self, counts: dict[int, int], drafts: dict[int, tuple[int, ...]]
    ) -> dict[int, RowReport]:
        """What single rows have to say. `counts`: confirmed tokens of those that drew."""
        draws = self.logprobs.entries() if self.logprobs else {}
        own = {row: draws[row][:count] for row, count in counts.items() if row in draws}
        prompts = self.prompt_logprobs.entries() if self.prompt_logprobs else {}
        return {
            row: RowReport(own.get(row, ()), prompts.get(row, ()), drafts.get(row, ()))
            for row in {*own, *prompts, *drafts}
        }
