# SPDX-License-Identifier: Apache-2.0
"""Drafts the next step's tokens with the MTP layer (MODEL §3).

The first pass covers every confirmed position of the step: it writes the MTP caches. Later passes
go on from each sequence's last one, reusing its selection if the setting says so, and always
recycling the post-norm hidden state.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from glmserve.config import PAGE_SIZE, EngineConfig
from glmserve.model.batch import StepBatch
from glmserve.model.caches import Caches
from glmserve.model.decoder import Decoder
from glmserve.model.mtp import Mtp
from glmserve.model.step import Selection
from glmserve.runtime.capture import Capture
from glmserve.runtime.drawing import Drawn
from glmserve.runtime.packing import Layout
from glmserve.runtime.row_state import RowState
from glmserve.runtime.sampler import Sampler


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


class Drafter:
    def __init__(
        self,
        config: EngineConfig,
        decoder: Decoder,
        mtp: Mtp,
        caches: Caches,
        sampler: Sampler,
        state: RowState,
    ) -> None:
        self.config, self.decoder, self.mtp = config, decoder, mtp
        self.caches, self.sampler, self.state = caches, sampler, state
        # The target's hidden state at each page's last slot: what the MTP entry after a prefix
        # hit is made from (DESIGN §3.3).
        self.page_hidden: Tensor | None = None

    def draft(self, layout: Layout, hidden: Tensor, drawn: Drawn, capture: Capture | None) -> None:
        """Feeds the confirmed positions to the MTP layer, leaves new drafts in the row state."""
        self._keep_page_ends(layout.batch, hidden)
        following = layout.following.clone()
        offset = torch.arange(drawn.tokens.shape[1], device=hidden.device)
        confirmed = offset[None, :] < drawn.count[:, None]  # [N, k + 1]
        following[(layout.first[:, None] + offset)[confirmed]] = drawn.tokens[confirmed]
        rows = self._first_pass_rows(layout, following, hidden)
        out, selection = self.mtp.forward(
            rows.batch, rows.following, rows.hidden, self.caches, None, write_index=True
        )
        if len(layout.sampled) == 0:
            return
        last = torch.searchsorted(rows.order, 2 * (layout.first + drawn.count - 1) + 1)
        draft = _Draft(rows.batch.select(last), out[last], selection.select(last))
        shared = self.config.share_draft_index
        assert shared is not None, "the engine process fills it in"
        if capture:  # the other way as well; it leaves nothing that a later step reads
            capture.drafts(not shared, *self._passes(draft, not shared))
        tokens, logits = self._passes(draft, shared)
        if capture:
            capture.drafts(shared, tokens, logits)
        if self.state.scripts:
            tokens = self._scripted(layout.sampled, tokens)
        self.state.drafts[layout.sampled] = tokens

    def _scripted(self, rows: Tensor, drafts: Tensor) -> Tensor:
        """Puts test drafts in place of the MTP layer's [N, k] where a request brings them."""
        drafts = drafts.clone()
        for draft, row, length in zip(
            drafts, rows.tolist(), self.state.length[rows].tolist(), strict=True
        ):
            if row not in self.state.scripts:
                continue
            prompt_length, script = self.state.scripts[row]
            start = length - prompt_length
            ahead = torch.from_numpy(script.output[start : start + len(draft)].astype(np.int64))
            draft[: len(ahead)] = ahead
            if script.wrong_at is not None and script.wrong_at < len(draft):
                draft[script.wrong_at] = (draft[script.wrong_at] + 1) % self.sampler.valid_tokens
        return drafts

    def _keep_page_ends(self, batch: StepBatch, hidden: Tensor) -> None:
        if self.page_hidden is None:
            self.page_hidden = hidden.new_zeros(self.config.num_pages, hidden.shape[1])
        ends = batch.positions % PAGE_SIZE == PAGE_SIZE - 1
        lines, positions = batch.row_seq[ends], batch.positions[ends]
        self.page_hidden[batch.page_table[lines, positions // PAGE_SIZE]] = hidden[ends]

    def _first_pass_rows(self, layout: Layout, following: Tensor, hidden: Tensor) -> _FirstPass:
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
                return torch.tensor(values, dtype=torch.int64, device=hidden.device)

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

    def _passes(self, draft: _Draft, share: bool) -> tuple[Tensor, list[Tensor]]:
        """Draft tokens [N, k] from the first pass's last rows, and each pass's logits shard."""
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
