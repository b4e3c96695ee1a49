# SPDX-License-Identifier: Apache-2.0
"""One step of the model on this rank: target forward, draws, verification, draft passes.

The shape of a step is known to the host, its contents to the device alone: nothing is read back
to decide what comes next. A step is launched by `run` and waited for through what `run` returns.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from glmserve.config import EngineConfig
from glmserve.messages import PrefillChunk, StepMasks, StepPlan
from glmserve.model.caches import Caches
from glmserve.model.decoder import Decoder
from glmserve.model.expert_load import ExpertLoad
from glmserve.model.mtp import Mtp
from glmserve.model.taps import Taps
from glmserve.runtime.capture import Capture
from glmserve.runtime.drafting import Drafter
from glmserve.runtime.drawing import Drawer
from glmserve.runtime.grammar_masks import GrammarMasks
from glmserve.runtime.graphs import Graphs
from glmserve.runtime.logit_shaping import LogitShaping
from glmserve.runtime.logprobs import LogprobReporter
from glmserve.runtime.packing import (
    MIXED_ROWS,
    Layout,
    Places,
    Shape,
    bucket_of,
    buckets,
    pack,
    step_arrays,
)
from glmserve.runtime.reach import Reach
from glmserve.runtime.result_slots import ResultSlots
from glmserve.runtime.results import Pending, to_host
from glmserve.runtime.row_state import RowState
from glmserve.runtime.sampler import Sampler
from glmserve.runtime.variants import ALL_VARIANTS, Variant

LOAD_PERIOD = 1.0  # seconds between two reports of how often each expert was chosen
# Chunk lengths around which kernels are compiled in other forms.
_WARM_LENGTHS = (1, 2, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 100, 128, 129, 192, 256, 257, 512, 1024)


def most_rows(config: EngineConfig) -> int:
    """Rows of the largest step: padded ones, or prompts beside every decoding sequence."""
    decoding = buckets(config.max_rows)[-1] * (config.drafts + 1)
    return max(decoding + config.chunk, MIXED_ROWS[-1])


def most_drawn(config: EngineConfig) -> int:
    """Rows that a step draws from: every one of a captured step, else those that are needed."""
    decoding = buckets(config.max_rows)[-1] * (config.drafts + 1)
    return max(decoding + config.max_rows, MIXED_ROWS[-1])


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
        self.config, self.decoder, self.caches, self.capture = config, decoder, caches, capture
        self.sampler, self.device = sampler, device
        self.state = RowState(config, device)
        self.reach = Reach(config.max_rows)
        self.shaping = LogitShaping(config.max_rows, int(sampler.ids[0]), len(sampler.ids), device)
        self.grammar = GrammarMasks(sampler.ids, fetch_masks)
        self.drawer = Drawer(decoder, sampler, self.state, self.shaping)
        self.drafter = Drafter(config, decoder, mtp, caches, sampler, self.state) if mtp else None
        self.reporter = LogprobReporter(decoder, sampler, self.state)
        layers = [*decoder.layers, *([mtp.layer] if mtp else [])]
        self.load = ExpertLoad(decoder.config, layers, self.state.padding, device)
        self._load_due = 0.0  # time.monotonic() of the next report of expert totals
        self.graphs = Graphs()
        most = max(buckets(config.max_rows)[-1], MIXED_ROWS[-1])
        self.slots = ResultSlots(most, config.drafts, device)
        self._newest: torch.cuda.Event | None = None  # the end of the step before, if a replay
        self._replayed: dict[Shape, tuple[int, ...]] = {}  # device rows that each one holds

    @torch.inference_mode()
    def prepare(self, progress: Callable[[str], None]) -> None:
        """On CUDA: compiles what prompts need and captures the decode steps."""
        if self.device.type != "cuda":
            return
        sizes = buckets(self.config.max_rows)
        self.sampler.prepare(most_drawn(self.config))
        self.shaping.prepare()
        chunk = self.config.chunk
        lengths = sorted({chunk, *(n for n in _WARM_LENGTHS if n < chunk)})
        for length in lengths:
            self._warm(length)
        torch.cuda.synchronize()
        progress(f"compiled prompt chunks of {len(lengths)} lengths up to {chunk}")
        config = self.config
        # References may ask the device in the middle of a step, which a capture forbids.
        served = config.dtype == "bf16" and not config.allow_reference
        if config.graphs and served and self.capture is None:
            width, nothing = self.config.drafts + 1, StepPlan(0)
            shapes = [Shape(size * width, size, mixed=False) for size in sizes]
            shapes += [Shape(size, min(size, self.config.max_rows), True) for size in MIXED_ROWS]
            layouts = {
                shape: pack(nothing, Places.of(nothing, width - 1, shape), self.state, None)
                for shape in shapes
            }
            self.graphs.capture(layouts, self.forward, self.finish, self.slots.send, progress)
            self.slots.restart()
        self.load.totals.zero_()  # what was only tried is no load
        to_host(self.load.totals)  # the pinned memory of later reports: no step waits for it

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> Pending:
        """Launches one plan; the results are the same on every rank."""
        for init in plan.admit:
            self.sampler.admit(init)
            self.shaping.admit(init)
            self.grammar.admit(init)
        self.state.admit(plan.admit, plan.grants)
        places = Places.of(plan, self.state.drafts, self._shape(plan))
        seen = self.reach.plan(plan, places)
        variant = Variant.of(places.rows, self.shaping, self.sampler)
        pending = Pending(plan.step, places, None, self.grammar.rows, self.reach)
        if self.drafter:
            self.drafter.resume(plan)
        # Scripted drafts are put in place by the host, between operators.
        replayed = places.shape in self.graphs.shapes and not self.state.scripts
        if replayed:
            self._replay(plan, places, variant, pending)
        else:
            self._run_eagerly(plan, places, variant, pending, seen)
        pending.expert_totals = self._expert_totals()
        pending.mark(self.device)
        # The device waits for the launches of an eager step, however early it was planned.
        self._newest = pending.done if replayed else None
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
        self, layout: Layout, hidden: Tensor, logits: Tensor, variant: Variant
    ) -> tuple[Tensor, Tensor | None]:
        """Draws, verifies, moves the rows on and drafts: draws [M], and the step's results
        [S, columns.result_width(k)] int32, None where nothing draws."""
        draws, results, last = self.state.no_tokens, None, None
        if len(layout.sequences):
            draws = self.drawer.draw(layout, logits, variant)
            results, last = self.drawer.verify(layout, draws, variant)
        if self.drafter:
            self.drafter.draft(layout, hidden, last, results, self.capture)
        return draws, results

    def _shape(self, plan: StepPlan) -> Shape | None:
        """What the plan is padded to. Without graphs, decode steps are padded all the same."""
        width = self.state.drafts + 1
        if self.state.scripts or not self.graphs.shapes:
            size = bucket_of(len(plan.decode)) if plan.decode else 0
            return None if plan.prefill else Shape(size * width, size, mixed=False)
        if plan.prefill:
            rows = len(plan.decode) * width + sum(chunk.length for chunk in plan.prefill)
            return self.graphs.mixed_shape(rows)
        return self.graphs.decode_shape(len(plan.decode))

    def _replay(self, plan: StepPlan, places: Places, variant: Variant, pending: Pending) -> None:
        assert places.shape is not None
        captured = self.graphs.shapes[places.shape]
        # A decode step brings nothing but its device rows, and they rarely change.
        if places.shape.mixed or self._replayed.get(places.shape) != places.decode:
            captured.layout.source.refill(step_arrays(plan, places, self.state))
            self._replayed[places.shape] = places.decode
        reported = self.reporter.asked(plan, places)
        pending.late = self._newest is not None and self._newest.query()
        if not (plan.masks_follow or reported):
            step = captured.whole[variant]
            pending.results = self.slots.take(step.sequences)
            step.graph.replay()
            return
        head, tail = captured.head, captured.tail
        pending.results = self.slots.take(tail.sequences)
        head.graph.replay()
        pending.prompt_logprobs = self.reporter.of_prompts(
            plan, places, captured.layout, head.hidden
        )
        own = head.logits.clone() if plan.masks_follow and reported else head.logits
        self._mask(plan, places, head.logits)
        tail.graph.replay()
        pending.logprobs = self.reporter.of_draws(places, own, tail.draws)

    def _run_eagerly(
        self, plan: StepPlan, places: Places, variant: Variant, pending: Pending, seen: int
    ) -> None:
        on_cuda = self.device.type == "cuda"  # on CPU the positions themselves can be asked
        layout = pack(plan, places, self.state, seen if on_cuda else None)
        taps = self.capture.begin() if self.capture else None
        hidden, logits = self.forward(layout, taps)
        pending.prompt_logprobs = self.reporter.of_prompts(plan, places, layout, hidden)
        masked = logits
        if plan.masks_follow:
            masked = logits.clone()
            self._mask(plan, places, masked)
        draws, results = self.finish(layout, hidden, masked, variant)
        if results is not None:
            pending.results = to_host(results).numpy
            pending.logprobs = self.reporter.of_draws(places, logits, draws)
        if self.capture:
            own = self.decoder.logits(hidden)
            self.capture.end(layout.batch, hidden, own, self.state.padding)

    def _mask(self, plan: StepPlan, places: Places, logits: Tensor) -> None:
        """Waits for the step's grammar masks and applies them in place."""
        if plan.masks_follow:
            self.grammar.apply_(logits, places.by_row(), self.grammar.receive(plan.step))

    def _warm(self, length: int) -> None:
        """Computes a prompt of `length` tokens in row 0, whose pages are still the scratch page."""
        tokens = np.zeros(length, dtype=np.int32)
        plan = StepPlan(0, prefill=(PrefillChunk(0, 0, length, tokens),))
        layout = pack(plan, Places.of(plan, self.state.drafts, None), self.state, length)
        for variant in ALL_VARIANTS:
            self.finish(layout, *self.forward(layout), variant)
