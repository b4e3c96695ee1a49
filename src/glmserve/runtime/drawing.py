# SPDX-License-Identifier: Apache-2.0
"""Draws the step's tokens, verifies drafts against them, advances the rows, reports logprobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from glmserve.messages import RowOutput, TokenLogprobs
from glmserve.model.decoder import Decoder
from glmserve.runtime.grammar_masks import GrammarMasks
from glmserve.runtime.logit_shaping import DrawingRows, LogitShaping
from glmserve.runtime.packing import Layout
from glmserve.runtime.row_state import RowState
from glmserve.runtime.sampler import Sampler


@dataclass(frozen=True)
class Drawn:
    tokens: Tensor  # [N, k + 1] draws of the sampled sequences, -1 where none
    count: Tensor  # [N] how many of them are confirmed
    outputs: tuple[RowOutput, ...]


class Drawer:
    def __init__(
        self,
        decoder: Decoder,
        sampler: Sampler,
        state: RowState,
        shaping: LogitShaping,
        grammar: GrammarMasks,
    ) -> None:
        self.decoder, self.sampler, self.state = decoder, sampler, state
        self.shaping, self.grammar = shaping, grammar

    def draw(self, layout: Layout, hidden: Tensor, masks: Mapping[int, Tensor]) -> Drawn:
        """Tokens for the sampled sequences of a step, from its hidden rows [R, D].

        masks: of the rows with a grammar, by device row.
        """
        state, batch = self.state, layout.batch
        k = state.drafts.shape[1]
        tokens = torch.full((len(layout.sampled), k + 1), -1, device=hidden.device)
        prompt_logprobs = self._prompt_logprobs(layout, hidden)
        if len(layout.sampled) == 0:
            return Drawn(tokens, tokens[:, 0], _prompt_outputs(prompt_logprobs))
        drafts = state.drafts[layout.sampled].clone()
        drafts[layout.decoding :] = -2  # a prefill has none: equal to no draw
        offset = torch.arange(k + 1, device=hidden.device)
        drawing = offset[None, :] < layout.width[:, None]  # [N, k + 1]
        index = (layout.first[:, None] + offset)[drawing]
        rows, positions = batch.row_seq[index], batch.positions[index] + 1
        logits = self.decoder.logits(hidden[index])
        ahead = torch.where(offset[None, :k] < offset[:, None], drafts[:, None, :], -1)[drawing]
        shaped = self.shaping.shape(
            self.grammar.apply(logits, layout, masks) if masks else logits,
            DrawingRows(rows, positions, ahead.clamp(min=-1)),
            state.stops[rows],
            state.stops_from[rows],
        )
        tokens[drawing] = self.sampler.sample(shaped, state.sampling(rows, positions))
        count, stopped, exhausted = state.advance(layout.sampled, tokens, drafts)
        confirmed = [ids[:n] for ids, n in zip(tokens.tolist(), count.tolist(), strict=True)]
        sequences = layout.sampled.tolist()
        self.shaping.confirm(sequences, confirmed)
        logprobs = self._logprobs(logits, rows, tokens[drawing])
        starts = (layout.width.cumsum(0) - layout.width).tolist()
        outputs = tuple(
            RowOutput(
                row,
                tuple(ids),
                stop,
                done,
                len(ids) - 1,
                tuple(logprobs[start : start + len(ids)]) if logprobs else (),
                prompt_logprobs.pop(row, ()),
            )
            for row, ids, stop, done, start in zip(
                sequences, confirmed, stopped.tolist(), exhausted.tolist(), starts, strict=True
            )
        )
        return Drawn(tokens, count, outputs + _prompt_outputs(prompt_logprobs))

    def _logprobs(self, logits: Tensor, rows: Tensor, tokens: Tensor) -> list[TokenLogprobs]:
        """One entry for each drawing row when any of them asks; empty otherwise."""
        wanted = self.state.logprobs[rows]
        return self._report(logits, tokens, wanted)

    def _prompt_logprobs(
        self, layout: Layout, hidden: Tensor
    ) -> dict[int, tuple[TokenLogprobs, ...]]:
        """Of the known next tokens of prompts that ask for them, by device row."""
        batch = layout.batch
        asking = (self.state.prompt_logprobs[batch.row_seq] >= 0) & (layout.following >= 0)
        index = torch.nonzero(asking)[:, 0]
        if len(index) == 0:
            return {}
        rows = batch.row_seq[index]
        entries = self._report(
            self.decoder.logits(hidden[index]),
            layout.following[index],
            self.state.prompt_logprobs[rows],
        )
        found: dict[int, tuple[TokenLogprobs, ...]] = {}
        for row, entry in zip(rows.tolist(), entries, strict=True):
            found[row] = (*found.get(row, ()), entry)
        return found

    def _report(self, logits: Tensor, tokens: Tensor, wanted: Tensor) -> list[TokenLogprobs]:
        """wanted [M]: alternatives for each row, -1 = none."""
        most = int(wanted.max())
        if most < 0:
            return []
        own, ids, values = self.sampler.logprobs(logits, tokens, most)
        return [
            TokenLogprobs(value, tuple(zip(row[:n], top[:n], strict=True)) if n > 0 else ())
            for value, row, top, n in zip(
                own.tolist(), ids.tolist(), values.tolist(), wanted.tolist(), strict=True
            )
        ]


def _prompt_outputs(found: dict[int, tuple[TokenLogprobs, ...]]) -> tuple[RowOutput, ...]:
    """Outputs of rows that report on their prompt and draw nothing yet."""
    return tuple(RowOutput(row, (), prompt_logprobs=entries) for row, entries in found.items())
