# SPDX-License-Identifier: Apache-2.0
"""One step of the model on this rank: target forward, draws, verification, draft passes.

The plan's rows are packed: first `drafts + 1` rows for each decoding sequence (its last token and
its drafts), then the rows of the prefill chunks. This is the eager form that CPU ranks run; a
CUDA graph replays the same sequence of operators.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from glmserve.config import PAGE_SIZE, EngineConfig
from glmserve.messages import PrefillChunk, RowOutput, StepPlan, StepResult
from glmserve.model.batch import StepBatch
from glmserve.model.caches import Caches
from glmserve.model.decoder import Decoder
from glmserve.model.mtp import Mtp
from glmserve.model.step import Selection
from glmserve.runtime.capture import Capture
from glmserve.runtime.row_state import RowState
from glmserve.runtime.sampler import Sampler


@dataclass(frozen=True)
class _Layout:
    """Where things are among the packed rows of a step."""

    batch: StepBatch
    next_tokens: Tensor  # [R] the token after each row's, where the plan knows it, else -1
    sampled: Tensor  # [N] sequences (device rows) that draw: decoding ones, then final prefills
    decoding: int  # how many of `sampled` decode
    first: Tensor  # [N] packed index of each sampled sequence's first drawing row
    width: Tensor  # [N] drawing rows: drafts + 1, or 1 for a prefill
    resumed: list[tuple[int, PrefillChunk]]  # prefix hits, by packed index of their first row


@dataclass(frozen=True)
class _FirstPass:
    """Rows of the MTP layer's first pass, packed as it wants them."""

    batch: StepBatch
    following: Tensor  # [M] the token after each row's
    hidden: Tensor  # [M, D]
    order: Tensor  # [M] ascending: 2 * packed index + 1 for a row of the step


@dataclass(frozen=True)
class _Draft:
    """What drafting goes on from: each sampled sequence's last confirmed row in the MTP layer."""

    batch: StepBatch  # [N] rows
    out: Tensor  # [N, D]
    selection: Selection


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
        self.config = config
        self.decoder, self.mtp = decoder, mtp
        self.caches, self.sampler = caches, sampler
        self.device = device
        self.capture = capture
        self.state = RowState(config, device)
        # The target's hidden state at each page's last slot: what the MTP entry after a prefix
        # hit is made from (DESIGN §3.3).
        self.page_hidden: Tensor | None = None

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Executes one plan; the result is the same on every rank."""
        start = time.perf_counter()
        self.state.admit(plan.admit)
        self.state.grant(plan.grants)
        layout = self._pack(plan)
        if layout is None:  # every row of the plan has ended meanwhile
            return StepResult(plan.step)
        taps = self.capture.begin() if self.capture else None
        hidden = self.decoder.forward(layout.batch, self.caches, taps)
        forward = time.perf_counter()
        draws, count, outputs = self._draw(layout, hidden)
        drawn = time.perf_counter()
        if self.mtp is not None:
            self._keep_page_ends(layout.batch, hidden)
            self._draft(layout, hidden, draws, count)
        if self.capture:
            self.capture.end(layout.batch, hidden, self.decoder.logits(hidden))
        timings = {
            "forward": forward - start,
            "sample": drawn - forward,
            "draft": time.perf_counter() - drawn,
        }
        return StepResult(plan.step, outputs, len(layout.batch.tokens), timings)

    # -- packing --------------------------------------------------------------------------

    def _pack(self, plan: StepPlan) -> _Layout | None:
        state, device = self.state, self.device
        planned = torch.tensor(plan.decode, dtype=torch.int64, device=device)
        decoding = planned[state.active[planned]]
        steps = torch.arange(self.config.drafts + 1, device=device)
        tokens = [
            torch.cat([state.last_token[decoding, None], state.drafts[decoding]], 1).flatten()
        ]
        positions = [(state.length[decoding, None] - 1 + steps).flatten()]
        rows = [decoding.repeat_interleave(len(steps))]
        next_tokens = [torch.full_like(tokens[0], -1)]
        sampled = [decoding]
        first = [torch.arange(len(decoding), device=device) * len(steps)]
        width = [torch.full_like(decoding, len(steps))]
        packed = len(tokens[0])
        resumed = []
        for chunk in plan.prefill:
            ids = torch.from_numpy(chunk.tokens).to(device, torch.int64)
            tokens.append(ids[: chunk.length])
            positions.append(torch.arange(chunk.start, chunk.start + chunk.length, device=device))
            rows.append(torch.full((chunk.length,), chunk.row, dtype=torch.int64, device=device))
            next_tokens.append(self._following(chunk, ids))
            if chunk.resumed:
                resumed.append((packed, chunk))
            packed += chunk.length
            if chunk.final:
                state.length[chunk.row] = chunk.start + chunk.length
                sampled.append(torch.tensor([chunk.row], device=device))
                first.append(torch.tensor([packed - 1], device=device))
                width.append(torch.tensor([1], device=device))
        if packed == 0:
            return None
        batch = StepBatch(
            torch.cat(tokens), torch.cat(positions), torch.cat(rows), state.page_table
        )
        return _Layout(
            batch,
            torch.cat(next_tokens),
            torch.cat(sampled),
            len(decoding),
            torch.cat(first),
            torch.cat(width),
            resumed,
        )

    @staticmethod
    def _following(chunk: PrefillChunk, ids: Tensor) -> Tensor:
        """The token after each of the chunk's; -1 after the prompt's last (it is drawn)."""
        unknown = ids.new_full((1 if chunk.final else 0,), -1)
        return torch.cat([ids[1:], unknown])

    # -- drawing --------------------------------------------------------------------------

    def _draw(
        self, layout: _Layout, hidden: Tensor
    ) -> tuple[Tensor, Tensor, tuple[RowOutput, ...]]:
        """Draws, verifies and advances; returns draws [N, k + 1], counts [N] and the outputs."""
        state, batch = self.state, layout.batch
        k = self.config.drafts
        total = len(layout.sampled)
        draws = torch.full((total, k + 1), -1, dtype=torch.int64, device=self.device)
        if total == 0:
            return draws, draws[:, 0], ()
        offset = torch.arange(k + 1, device=self.device)
        drawing = offset[None, :] < layout.width[:, None]  # [N, k + 1]
        index = (layout.first[:, None] + offset)[drawing]
        rows = batch.row_seq[index]
        logits = self.decoder.logits(hidden[index])
        draws[drawing] = self.sampler.sample(
            logits, state.sampling(rows, batch.positions[index] + 1)
        )
        drafts = state.drafts[layout.sampled].clone()
        drafts[layout.decoding :] = -2  # a prefill has none: equal to no draw
        count, stopped, exhausted = state.advance(layout.sampled, draws, drafts)
        outputs = tuple(
            RowOutput(row, tuple(ids[:n]), stop, done, n - 1)
            for row, ids, n, stop, done in zip(
                layout.sampled.tolist(),
                draws.tolist(),
                count.tolist(),
                stopped.tolist(),
                exhausted.tolist(),
                strict=True,
            )
        )
        return draws, count, outputs

    # -- drafting -------------------------------------------------------------------------

    def _draft(self, layout: _Layout, hidden: Tensor, draws: Tensor, count: Tensor) -> None:
        """Feeds the confirmed positions to the MTP layer and leaves new drafts in the row state.

        The first pass covers every confirmed position (it writes the MTP caches); later passes go
        on from each sequence's last one, reusing its selection if the setting says so, and always
        recycling the post-norm hidden (MODEL §3).
        """
        assert self.mtp is not None
        following = layout.next_tokens.clone()
        offset = torch.arange(draws.shape[1], device=self.device)
        confirmed = offset[None, :] < count[:, None]  # [N, k + 1]
        following[(layout.first[:, None] + offset)[confirmed]] = draws[confirmed]
        rows = self._first_pass_rows(layout, following, hidden)
        out, selection = self.mtp.forward(
            rows.batch, rows.following, rows.hidden, self.caches, None, write_index=True
        )
        if len(layout.sampled) == 0:
            return
        last = torch.searchsorted(rows.order, 2 * (layout.first + count - 1) + 1)
        draft = _Draft(rows.batch.select(last), out[last], selection.select(last))
        shared = self.config.share_draft_index
        if self.capture:  # the other way as well; it leaves nothing that a later step reads
            tokens, logits = self._draft_passes(draft, not shared)
            self.capture.drafts(not shared, tokens, logits)
        tokens, logits = self._draft_passes(draft, shared)
        if self.capture:
            self.capture.drafts(shared, tokens, logits)
        self.state.drafts[layout.sampled] = tokens

    def _first_pass_rows(self, layout: _Layout, following: Tensor, hidden: Tensor) -> _FirstPass:
        """The confirmed rows, and ahead of each prefix hit the entry that the hit lacks.

        The entry of position i lies in slot i + 1, so the first slot after a hit needs the
        hidden state of the hit's last position.
        """
        kept = torch.nonzero(following >= 0)[:, 0]  # rejected drafts have no following token
        batch = layout.batch.select(kept)
        order, following, hidden = 2 * kept + 1, following[kept], hidden[kept]
        if layout.resumed:
            assert self.page_hidden is not None
            hits = [chunk for _, chunk in layout.resumed]

            def column(values: list[int]) -> Tensor:
                return torch.tensor(values, dtype=torch.int64, device=self.device)

            positions = column([chunk.start - 1 for chunk in hits])
            lines = column([chunk.row for chunk in hits])
            pages = self.state.page_table[lines, positions // PAGE_SIZE]
            order = torch.cat([order, column([2 * index for index, _ in layout.resumed])])
            order, sort = order.sort()
            tokens = column([int(chunk.tokens[0]) for chunk in hits])
            following = torch.cat([following, tokens])[sort]
            hidden = torch.cat([hidden, self.page_hidden[pages]])[sort]
            batch = StepBatch(
                following,
                torch.cat([batch.positions, positions])[sort],
                torch.cat([batch.row_seq, lines])[sort],
                batch.page_table,
            )
        return _FirstPass(batch, following, hidden, order)

    def _keep_page_ends(self, batch: StepBatch, hidden: Tensor) -> None:
        if self.page_hidden is None:
            self.page_hidden = hidden.new_zeros(self.config.num_pages, hidden.shape[1])
        ends = batch.positions % PAGE_SIZE == PAGE_SIZE - 1
        lines, positions = batch.row_seq[ends], batch.positions[ends]
        self.page_hidden[batch.page_table[lines, positions // PAGE_SIZE]] = hidden[ends]

    def _draft_passes(self, draft: _Draft, share: bool) -> tuple[Tensor, list[Tensor]]:
        """Draft tokens [N, k] from the first pass's last rows, and each pass's logits shard."""
        assert self.mtp is not None
        batch, out = draft.batch, draft.out
        logits = [self.decoder.logits(out)]
        tokens = [self.sampler.greedy(logits[0])]
        for _ in range(1, self.config.drafts):
            batch = batch.advance()
            selection = draft.selection if share else None
            out, _ = self.mtp.forward(batch, tokens[-1], out, self.caches, selection, not share)
            logits.append(self.decoder.logits(out))
            tokens.append(self.sampler.greedy(logits[-1]))
        return torch.stack(tokens, dim=1), logits
