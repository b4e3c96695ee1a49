# SPDX-License-Identifier: Apache-2.0
"""A step's results on their way to the host: copied behind the step, read when they are there.

On CUDA the copies go to pinned memory and an event follows them, so that the next step can be
launched first (DESIGN §3.1). Log-probabilities are read only in steps with a row that asks.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from glmserve.kernels.row_state import columns
from glmserve.messages import RowOutput, StepResult, TokenLogprobs
from glmserve.runtime.packing import Places


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
    results: Tensor | None  # [S, columns.result_width(k)] int32 on the host; None: nothing drawn
    with_drafts: Container[int]  # rows whose new drafts are reported
    logprobs: Report | None = None
    prompt_logprobs: Report | None = None
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
        places = self.places
        logprobs = self.logprobs.entries() if self.logprobs else {}
        prompts = self.prompt_logprobs.entries() if self.prompt_logprobs else {}
        outputs, rows_computed = [], places.prefill_rows
        lines = [] if self.results is None else self.results.tolist()
        del lines[len(places.decode) : places.bucket]  # padding
        for i, (row, line) in enumerate(zip((*places.decode, *places.finals), lines, strict=True)):
            count, flags = line[columns.COUNT], line[columns.FLAGS]
            if not count:
                continue  # it had ended
            if i < len(places.decode):
                rows_computed += places.width
            start = columns.TOKENS
            outputs.append(
                RowOutput(
                    row,
                    tuple(line[start : start + count]),
                    bool(flags & columns.STOPPED),
                    bool(flags & columns.EXHAUSTED),
                    count - 1,
                    logprobs.get(row, ())[:count],
                    prompts.pop(row, ()),
                    tuple(line[start + places.width :]) if row in self.with_drafts else (),
                )
            )
        # Rows that report on their prompt and draw nothing yet.
        outputs += [RowOutput(row, (), prompt_logprobs=found) for row, found in prompts.items()]
        return StepResult(self.step, tuple(outputs), rows_computed)
