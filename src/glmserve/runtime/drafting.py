# SPDX-License-Identifier: Apache-2.0
"""Drafts the next step's tokens with the MTP layer (MODEL §3).

The first pass covers every row of the step and writes the MTP caches. Rows of rejected drafts
write slots past the confirmed length: the row has them reserved, and every one is written anew
before something reads it. Later passes go on from each sequence's last confirmed row, reusing its
selection if the setting says so, and always recycling the post-norm hidden state.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from glmserve.config import PAGE_SIZE, EngineConfig
from glmserve.kernels.row_state import keep_page_ends, store_drafts
from glmserve.kernels.slot_lookup import slot_lookup
from glmserve.kernels.take_rows import take_rows
from glmserve.messages import StepPlan
from glmserve.model.batch import StepBatch
from glmserve.model.caches import Caches
from glmserve.model.decoder import Decoder
from glmserve.model.mtp import Mtp
from glmserve.model.step import Selection
from glmserve.runtime.capture import Capture
from glmserve.runtime.packing import Layout, resumed_batch
from glmserve.runtime.row_state import RowState
from glmserve.runtime.sampler import Sampler


@dataclass(frozen=True)
class _Draft:
    """What drafting goes on from: each sequence's last confirmed row in the MTP layer."""

    batch: StepBatch  # [S] rows
    out: Tensor  # [S, D]
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
        norm = decoder.weights.norm
        self.page_hidden = norm.new_zeros(config.num_pages, len(norm))

    def resume(self, plan: StepPlan) -> None:
        """Writes the entries that the plan's prefix hits lack."""
        found = resumed_batch(plan.prefill, self.state)
        if found is None:
            return
        batch, following, logical = found
        pages = slot_lookup(logical, self.state.page_table, batch.row_seq, 1)[:, 0]
        hidden = take_rows(self.page_hidden, pages)
        self.mtp.forward(batch, following, hidden, self.caches, None, write_index=True)

    def draft(
        self,
        layout: Layout,
        hidden: Tensor,
        last: Tensor | None,
        results: Tensor | None,
        capture: Capture | None,
    ) -> None:
        """Feeds the step's rows to the MTP layer; new drafts go to the row state and `results`.

        last [S]: each sequence's last confirmed row, from the verification; None without any.
        """
        batch = layout.batch
        keep_page_ends(
            hidden, batch.positions, batch.row_seq, batch.page_table, PAGE_SIZE, self.page_hidden
        )
        out, selection = self.mtp.forward(
            batch, layout.following, hidden, self.caches, None, write_index=True
        )
        if last is None:
            return
        assert results is not None
        draft = _Draft(batch.select(last), take_rows(out, last), selection.select(last))
        shared = self.config.share_draft_index
        assert shared is not None, "the engine process fills it in"
        if capture:  # the other way as well; it leaves nothing that a later step reads
            capture.drafts(not shared, *self._passes(draft, not shared))
        tokens, logits = self._passes(draft, shared)
        if capture:
            capture.drafts(shared, tokens, logits)
        if self.state.scripts:
            tokens = self._scripted(layout.rows, tokens)
        for number, ids in enumerate(tokens):
            store_drafts(
                self.state.table, layout.sequences, ids, number, self.state.drafts, results
            )

    def _scripted(self, rows: Tensor, drafts: list[Tensor]) -> list[Tensor]:
        """Puts test drafts in place of the MTP layer's k times [S] where a request brings them."""
        table = torch.stack(drafts, dim=1)
        lengths = self.state.lengths(rows).tolist()
        for draft, row, length in zip(table, rows.tolist(), lengths, strict=True):
            if row not in self.state.scripts:
                continue
            prompt_length, script = self.state.scripts[row]
            start = max(length - prompt_length, 0)
            ahead = torch.from_numpy(script.output[start : start + len(draft)].astype(np.int64))
            draft[: len(ahead)] = ahead
            if script.wrong_at is not None and script.wrong_at < len(draft):
                draft[script.wrong_at] = (draft[script.wrong_at] + 1) % self.sampler.valid_tokens
        return list(table.unbind(1))

    def _passes(self, draft: _Draft, share: bool) -> tuple[list[Tensor], list[Tensor]]:
        """Draft tokens, k times [S], from the first pass's last rows; each pass's logits shard."""
        batch, out = draft.batch, draft.out
        logits = [self.decoder.logits(out)]
        tokens = [self.sampler.greedy(logits[0])]
        for _ in range(1, self.config.drafts):
            batch = batch.advance()
            selection = draft.selection if share else None
            out, _ = self.mtp.forward(batch, tokens[-1], out, self.caches, selection, not share)
            logits.append(self.decoder.logits(out))
            tokens.append(self.sampler.greedy(logits[-1]))
        return tokens, logits
