# SPDX-License-Identifier: Apache-2.0
"""One step of the model on this rank: target forward, draws, verification, draft passes.

This is the eager form that CPU ranks run; a CUDA graph replays the same sequence of operators.
"""

from __future__ import annotations

import time

import torch

from glmserve.config import EngineConfig
from glmserve.messages import StepPlan, StepResult
from glmserve.model.caches import Caches
from glmserve.model.decoder import Decoder
from glmserve.model.mtp import Mtp
from glmserve.runtime.capture import Capture
from glmserve.runtime.drafting import Drafter
from glmserve.runtime.drawing import Drawer
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
        capture: Capture | None = None,
    ) -> None:
        assert (mtp is not None) == (config.drafts > 0)
        self.decoder, self.caches, self.capture = decoder, caches, capture
        self.state = RowState(config, device)
        self.shaping = LogitShaping(config.max_rows, int(sampler.ids[0]), len(sampler.ids), device)
        self.drawer = Drawer(decoder, sampler, self.state, self.shaping)
        self.drafter = Drafter(config, decoder, mtp, caches, sampler, self.state) if mtp else None

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Executes one plan; the result is the same on every rank."""
        start = time.perf_counter()
        for init in plan.admit:
            self.state.admit(init)
            self.shaping.admit(init)
        self.state.grant(plan.grants)
        layout = pack(plan, self.state)
        if layout is None:
            return StepResult(plan.step)
        taps = self.capture.begin() if self.capture else None
        hidden = self.decoder.forward(layout.batch, self.caches, taps)
        forward = time.perf_counter()
        drawn = self.drawer.draw(layout, hidden)
        sampled = time.perf_counter()
        if self.drafter:
            self.drafter.draft(layout, hidden, drawn, self.capture)
        if self.capture:
            self.capture.end(layout.batch, hidden, self.decoder.logits(hidden))
        timings = {
            "forward": forward - start,
            "sample": sampled - forward,
            "draft": time.perf_counter() - sampled,
        }
        return StepResult(plan.step, drawn.outputs, len(layout.batch.tokens), timings)
