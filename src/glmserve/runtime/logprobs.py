# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of a step's tokens and prompts, computed only when a row asks for them.

They run after the step's own operators and outside any captured graph. Not its job: what they
mean (`messages.TokenLogprobs`), or reading them back (`results`).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from glmserve.kernels.take_rows import take_rows
from glmserve.messages import StepPlan
from glmserve.model.decoder import Decoder
from glmserve.runtime.packing import Layout, Places
from glmserve.runtime.results import Report, to_host
from glmserve.runtime.row_state import RowState
from glmserve.runtime.sampler import Sampler
from glmserve.runtime.uploads import upload


class LogprobReporter:
    def __init__(self, decoder: Decoder, sampler: Sampler, state: RowState) -> None:
        self.decoder, self.sampler, self.state = decoder, sampler, state

    def asked(self, plan: StepPlan, places: Places) -> bool:
        """Whether any row of the step reports log-probabilities."""
        kept, prompts = self.state.logprobs, self.state.prompt_logprobs
        return (bool(kept) and any(row in kept for row in places.rows)) or (
            bool(prompts) and any(chunk.row in prompts for chunk in plan.prefill)
        )

    def of_draws(self, places: Places, logits: Tensor, draws: Tensor) -> Report | None:
        """Of the drawn tokens [M], from the model's own logits [M, V/N]."""
        rows: list[int] = []
        index: list[int] = []
        for row, (first, width) in places.by_row().items():
            if row in self.state.logprobs:
                rows += [row] * width
                index += range(first, first + width)
        return self._report(rows, index, self.state.logprobs, logits, draws)

    def of_prompts(
        self, plan: StepPlan, places: Places, layout: Layout, hidden: Tensor
    ) -> Report | None:
        """Of the known next tokens of prompts that ask, from the step's hidden rows [R, D]."""
        rows: list[int] = []
        index: list[int] = []
        at = len(places.decode) * places.width
        for chunk in plan.prefill:
            if chunk.row in self.state.prompt_logprobs:
                known = chunk.length - chunk.final
                rows += [chunk.row] * known
                index += range(at, at + known)
            at += chunk.length
        if not rows:
            return None
        (lines,) = upload([np.array(index, dtype=np.int64)], self.state.device)
        logits = self.decoder.logits(take_rows(hidden, lines))
        tokens = take_rows(layout.following, lines)
        return self._report(rows, range(len(rows)), self.state.prompt_logprobs, logits, tokens)

    def _report(
        self,
        rows: list[int],
        index: list[int] | range,
        asked: dict[int, int],
        logits: Tensor,
        tokens: Tensor,
    ) -> Report | None:
        if not rows:
            return None
        (lines,) = upload([np.array(index, dtype=np.int64)], self.state.device)
        wanted = [asked[row] for row in rows]
        own, ids, values = self.sampler.logprobs(
            take_rows(logits, lines), take_rows(tokens, lines), max(wanted)
        )
        host: list[torch.Tensor] = [to_host(x) for x in (own, ids, values)]
        return Report(rows, wanted, *host)
