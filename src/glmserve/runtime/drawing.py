# SPDX-License-Identifier: Apache-2.0
"""Draws a step's tokens, verifies drafts against them and moves the rows on, all on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from glmserve.kernels.row_state import columns, verify_rows
from glmserve.model.decoder import Decoder
from glmserve.runtime.logit_shaping import DrawingRows, LogitShaping
from glmserve.runtime.packing import Layout
from glmserve.runtime.row_state import RowState
from glmserve.runtime.sampler import Sampler
from glmserve.runtime.variants import Variant


class Drawer:
    def __init__(
        self, decoder: Decoder, sampler: Sampler, state: RowState, shaping: LogitShaping
    ) -> None:
        self.decoder, self.sampler, self.state, self.shaping = decoder, sampler, state, shaping

    def logits(self, layout: Layout, hidden: Tensor) -> Tensor:
        """The model's logits [M, V/N] of the drawing rows, from the step's hidden rows [R, D]."""
        return self.decoder.logits(layout.drawn(hidden))

    def draw(self, layout: Layout, logits: Tensor, variant: Variant) -> Tensor:
        """Tokens [M] int64, the same on every rank."""
        state = self.state
        rows = layout.drawn(layout.batch.row_seq)
        positions = layout.drawn(layout.next_positions)
        if variant.shaped:
            drawing = DrawingRows(rows, positions, layout.ahead)
            logits = self.shaping.shape(logits, drawing, state.stops, state.stops_from)
        return self.sampler.sample(logits, state.sampling(rows, positions), variant.limited)

    def verify(self, layout: Layout, draws: Tensor, variant: Variant) -> tuple[Tensor, Tensor]:
        """Moves the rows on; also fills `layout.following`.

        Returns the step's results [S, columns.result_width(k)] int32, drafts still open, and the
        number of each sequence's last confirmed row [S].
        """
        state = self.state
        width = columns.result_width(state.drafts)
        count = len(layout.sequences)
        results = torch.empty(count, width, dtype=torch.int32, device=draws.device)
        last = torch.empty(count, dtype=torch.int64, device=draws.device)
        verify_rows(
            state.table, layout.sequences, draws, state.drafts, layout.following, last, results
        )
        if variant.shaped:
            tokens = results[:, columns.TOKENS : columns.TOKENS + state.drafts + 1]
            self.shaping.confirm(layout.rows, tokens, results[:, columns.COUNT])
        return results, last
