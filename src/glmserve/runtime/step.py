# SPDX-License-Identifier: Apache-2.0
"""One step of the model on this rank: target forward, draws, verification, draft passes.

This is the eager form that CPU ranks run; a CUDA graph replays the same sequence of operators.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from glmserve.config import EngineConfig
from glmserve.messages import RowOutput, StepMasks, StepPlan, StepResult
from glmserve.model.caches import Caches
from glmserve.model.decoder import Decoder
from glmserve.model.mtp import Mtp
from glmserve.runtime.capture import Capture
from glmserve.runtime.drafting import Drafter
from glmserve.runtime.drawing import Drawer
from glmserve.runtime.grammar_masks import GrammarMasks
from glmserve.runtime.logit_shaping import LogitShaping
from glmserve.runtime.packing import pack
from glmserve.runtime.row_state import RowState
from glmserve.runtime.sampler import Sampler


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
        self.shaping = LogitShaping(config.max_rows, int(sampler.ids[0]), len(sampler.ids), device)
        self.grammar = GrammarMasks(sampler.ids, fetch_masks)
        self.drawer = Drawer(decoder, sampler, self.state, self.shaping, self.grammar)
        self.drafter = Drafter(config, decoder, mtp, caches, sampler, self.state) if mtp else None

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Executes one plan; the result is the same on every rank."""
        for init in plan.admit:
            self.state.admit(init)
            self.shaping.admit(init)
            self.grammar.admit(init)
        self.state.grant(plan.grants)
        layout = pack(plan, self.state)
        if layout is None:
            assert not plan.masks_follow, (
                "rows with a grammar are planned when they are known to run"
            )
            return StepResult(plan.step)
        taps = self.capture.begin() if self.capture else None
        hidden = self.decoder.forward(layout.batch, self.caches, taps)
        masks = self.grammar.receive(plan.step) if plan.masks_follow else {}
        drawn = self.drawer.draw(layout, hidden, masks)
        if self.drafter:
            self.drafter.draft(layout, hidden, drawn, self.capture)
        if self.capture:
            self.capture.end(layout.batch, hidden, self.decoder.logits(hidden))
        outputs = self._with_drafts(drawn.outputs) if masks else drawn.outputs
        return StepResult(plan.step, outputs, len(layout.batch.tokens))

    def _with_drafts(self, outputs: tuple[RowOutput, ...]) -> tuple[RowOutput, ...]:
        """Adds the new drafts of rows with a grammar: the engine makes masks along them."""
        return tuple(
            out._replace(drafts=tuple(self.state.drafts[out.row].tolist()))
            if self.grammar.has(out.row)
            else out
            for out in outputs
        )
