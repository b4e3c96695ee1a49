# SPDX-License-Identifier: Apache-2.0
"""One step of the model on this rank: target forward, draws, verification, draft passes.

The shape of a step is known to the host, its contents to the device alone: nothing is read back
to decide what comes next. A step is launched by `run` and waited for through what `run` returns.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from glmserve.config import EngineConfig
from glmserve.messages import StepMasks, StepPlan
from glmserve.model.caches import Caches
from glmserve.model.decoder import Decoder
from glmserve.model.expert_load import ExpertLoad
from glmserve.model.mtp import Mtp
from glmserve.model.taps import Taps
from glmserve.runtime.capture import Capture
from glmserve.runtime.drafting import Drafter
from glmserve.runtime.drawing import Drawer
from glmserve.runtime.grammar_masks import GrammarMasks
from glmserve.runtime.logit_shaping import LogitShaping
from glmserve.runtime.logprobs import LogprobReporter
from glmserve.runtime.packing import Layout, Places, decode_layout, pack, padded_rows
from glmserve.runtime.results import Pending, to_host
from glmserve.runtime.row_state import RowState
from glmserve.runtime.sampler import Sampler
from glmserve.runtime.uploads import upload

LOAD_PERIOD = 1.0  # seconds between two reports of how often each expert was chosen


class StepRunner:
    """Runs plans; all ranks run the same plans in the same order."""

    def __init__(
        self,
        config: EngineConfig,
        decoder: Decoder,
        mtp: Mtp | None,
        caches: Caches,
        sampler: Sampler,
        device: torch.device,
        fetch_masks: Callable[[], StepMasks],
        capture: Capture | None = None,
    ) -> None:
        """`fetch_masks` waits for the masks that follow a plan (`StepPlan.masks_follow`)."""
        assert (mtp is not None) == (config.drafts > 0)
        self.decoder, self.caches, self.capture = decoder, caches, capture
        self.state = RowState(config, device)
        lines = config.max_rows + 1
        self.shaping = LogitShaping(lines, int(sampler.ids[0]), len(sampler.ids), device)
        self.grammar = GrammarMasks(sampler.ids, fetch_masks)
        self.drawer = Drawer(decoder, sampler, self.state, self.shaping)
        self.drafter = Drafter(config, decoder, mtp, caches, sampler, self.state) if mtp else None
        self.reporter = LogprobReporter(decoder, sampler, self.state)
        layers = [*decoder.layers, *([mtp.layer] if mtp else [])]
        self.load = ExpertLoad(decoder.config, layers, self.state.padding, device)
        self._load_due = 0.0  # time.monotonic() of the next report of expert totals

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> Pending:
        """Launches one plan; the results are the same on every rank."""
        for init in plan.admit:
            self.shaping.admit(init)
            self.grammar.admit(init)
        self.state.admit(plan.admit, plan.grants)
        places = Places.of(plan, self.state.drafts)
        layout = self._layout(plan, places)
        if self.drafter:
            self.drafter.resume(plan)
        taps = self.capture.begin() if self.capture else None
        hidden, logits = self.forward(layout, taps)
        pending = Pending(plan.step, places, None, self.grammar.rows)
        pending.prompt_logprobs = self.reporter.of_prompts(plan, places, layout, hidden)
        shaped = logits
        if plan.masks_follow:
            masks = self.grammar.receive(plan.step)
            shaped = self.grammar.apply(logits, places.by_row(), masks)
        draws, results = self.finish(layout, hidden, shaped)
        if results is not None:
            pending.results = to_host(results)
            pending.logprobs = self.reporter.of_draws(places, logits, draws)
        if self.capture:
            self.capture.end(layout.batch, hidden, self.decoder.logits(hidden), self.state.padding)
        pending.expert_totals = self._expert_totals()
        pending.mark(self.state.device)
        return pending

    def _expert_totals(self) -> Tensor | None:
        """[routed layers, experts] on the host, once in a while; what this step adds included."""
        now = time.monotonic()
        if now < self._load_due:
            return None
        self._load_due = now + LOAD_PERIOD
        return to_host(self.load.totals)

    def forward(self, layout: Layout, taps: Taps | None = None) -> tuple[Tensor, Tensor]:
        """The target model: hidden rows [R, D] and logits [M, V/N] of the drawing rows."""
        layout.place(self.state)
        hidden = self.decoder.forward(layout.batch, self.caches, taps)
        return hidden, self.drawer.logits(layout, hidden)

    def finish(
        self, layout: Layout, hidden: Tensor, logits: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Draws, verifies, moves the rows on and drafts: draws [M], and the step's results
        [S, columns.result_width(k)] int32, None where nothing draws."""
        draws, results, last = self.state.no_tokens, None, None
        if layout.sequences:
            draws = self.drawer.draw(layout, logits)
            results, last = self.drawer.verify(layout, draws)
        if self.drafter:
            self.drafter.draft(layout, hidden, last, results, self.capture)
        return draws, results

    def _layout(self, plan: StepPlan, places: Places) -> Layout:
        if plan.prefill:
            return pack(plan, places, self.state, None)
        rows = padded_rows(places.decode, places.bucket, self.state.padding)
        return decode_layout(upload([rows], self.state.device)[0], self.state)
