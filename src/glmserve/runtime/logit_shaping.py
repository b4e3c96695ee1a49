# SPDX-License-Identifier: Apache-2.0
"""What requests may change about their logits before temperature, over a vocabulary shard.

Order as in vLLM's sampler: allowed ids, bad words, min_tokens, logit_bias, penalties. Each drawing
row sees the confirmed tokens and the drafts ahead of it in the step, so verification rows are
treated exactly as the same tokens would be without drafts. Dense tables over (row, shard) keep
counts; they are made when the first request asks for any of this.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from glmserve.messages import IntArray, RowInit, Shaping


@dataclass(frozen=True)
class DrawingRows:
    """M rows of logits that are drawn from."""

    rows: Tensor  # [M] int64, device row
    positions: Tensor  # [M] int64, of the token to draw
    ahead: Tensor  # [M, k] int64, drafts of this step ahead of it, padded with -1


class LogitShaping:
    """Tables of `max_rows` rows over the token ids [first, first + width) of this shard."""

    def __init__(self, max_rows: int, first: int, width: int, device: torch.device) -> None:
        self.first, self.width, self.max_rows, self.device = first, width, max_rows, device
        self._shaped: dict[int, Shaping] = {}  # rows that ask for anything
        self._history: dict[int, list[int]] = {}  # prompt and output of rows with bad words
        self._tables: _Tables | None = None

    def admit(self, init: RowInit) -> None:
        """Takes a row's settings; forgets those of the row's previous sequence."""
        self._shaped.pop(init.row, None)
        self._history.pop(init.row, None)
        shaping = init.shaping
        if shaping is None:
            return
        if self._tables is None:
            self._tables = _Tables.make(self.max_rows, self.width, self.device)
        self._shaped[init.row] = shaping
        tables, row = self._tables, init.row
        tables.in_prompt[row] = False
        tables.in_prompt[row, self._local(shaping.prompt)] = True
        tables.output_count[row] = 0
        self._count(row, shaping.output)
        tables.bias[row] = 0.0
        for token, bias in shaping.logit_bias:
            if self.first <= token < self.first + self.width:
                tables.bias[row, token - self.first] += bias
        tables.allowed[row] = shaping.allowed_token_ids is None
        if shaping.allowed_token_ids is not None:
            ids = np.asarray(shaping.allowed_token_ids, dtype=np.int32)
            tables.allowed[row, self._local(ids)] = True
        tables.penalties[row] = torch.tensor(
            [shaping.presence_penalty, shaping.frequency_penalty, shaping.repetition_penalty]
        )
        if shaping.bad_word_ids:
            self._history[row] = [*shaping.prompt.tolist(), *shaping.output.tolist()]

    def confirm(self, rows: list[int], tokens: list[list[int]]) -> None:
        """Counts the tokens that a step has confirmed."""
        for row, ids in zip(rows, tokens, strict=True):
            if row in self._shaped:
                self._count(row, np.asarray(ids, dtype=np.int32))
            if row in self._history:
                self._history[row] += ids

    def shape(
        self, logits: Tensor, drawing: DrawingRows, stops: Tensor, stops_from: Tensor
    ) -> Tensor:
        """Returns logits [M, width] fp32 or wider with every setting applied.

        stops [M, s] int64 ids (-1 = none) that a row cannot draw before position stops_from [M].
        """
        early = drawing.positions < stops_from
        if self._tables is not None and any(row in self._shaped for row in drawing.rows.tolist()):
            logits = self._banned(logits, drawing)
        if bool(early.any()):
            banned = torch.where(early[:, None], stops - self.first, -1)
            logits = _mask_ids(logits, banned)
        if self._tables is not None and any(row in self._shaped for row in drawing.rows.tolist()):
            logits = self._penalised(logits, drawing)
        return logits

    def _banned(self, logits: Tensor, drawing: DrawingRows) -> Tensor:
        """Allowed ids and bad words."""
        assert self._tables is not None
        plain = self._plain(drawing.rows)
        allowed = self._tables.allowed[drawing.rows] | plain[:, None]
        logits = logits.masked_fill(~allowed, -torch.inf)
        completions = [
            self._completions(row, [token for token in ahead if token >= 0])
            for row, ahead in zip(drawing.rows.tolist(), drawing.ahead.tolist(), strict=True)
        ]
        longest = max(len(ids) for ids in completions)
        if longest:
            banned = torch.tensor([ids + [-1] * (longest - len(ids)) for ids in completions])
            logits = _mask_ids(logits, banned.to(logits.device))
        return logits

    def _completions(self, row: int, ahead: list[int]) -> list[int]:
        """Columns of this shard that would complete a bad word of the row."""
        if row not in self._history:
            return []
        history = self._history[row] + ahead
        last = [
            word[-1] - self.first
            for word in self._shaped[row].bad_word_ids
            if len(word) == 1 or history[1 - len(word) :] == list(word[:-1])
        ]
        return [column for column in last if 0 <= column < self.width]

    def _penalised(self, logits: Tensor, drawing: DrawingRows) -> Tensor:
        """Logit bias, then repetition, frequency and presence penalties."""
        tables = self._tables
        assert tables is not None
        rows = drawing.rows
        plain = self._plain(rows)
        count = tables.output_count[rows]
        local = drawing.ahead - self.first
        inside = (drawing.ahead >= 0) & (local >= 0) & (local < self.width)
        count = count.scatter_add(1, torch.where(inside, local, 0), inside.to(count.dtype))
        presence, frequency, repetition = (
            tables.penalties[rows].to(logits.dtype)[..., None].unbind(1)
        )
        shaped = logits + tables.bias[rows].to(logits.dtype)
        seen = tables.in_prompt[rows] | (count > 0)
        repeated = torch.where(shaped > 0, shaped / repetition, shaped * repetition)
        shaped = torch.where(seen, repeated, shaped)
        shaped = shaped - frequency * count - presence * (count > 0)
        return torch.where(plain[:, None], logits, shaped)

    def _plain(self, rows: Tensor) -> Tensor:
        """[M] bool: rows that ask for nothing (their table lines may be another sequence's)."""
        return torch.tensor([row not in self._shaped for row in rows.tolist()], device=rows.device)

    def _count(self, row: int, tokens: IntArray) -> None:
        assert self._tables is not None
        local = self._local(tokens)
        self._tables.output_count[row].index_add_(0, local, torch.ones_like(local))

    def _local(self, tokens: IntArray) -> Tensor:
        """Columns of the tokens that this shard has."""
        columns = torch.from_numpy(tokens.astype(np.int64)).to(self.device) - self.first
        return columns[(columns >= 0) & (columns < self.width)]


@dataclass
class _Tables:
    in_prompt: Tensor  # [rows, width] bool
    output_count: Tensor  # [rows, width] int64
    bias: Tensor  # [rows, width] fp32
    allowed: Tensor  # [rows, width] bool
    penalties: Tensor  # [rows, 3] fp64: presence, frequency, repetition

    @classmethod
    def make(cls, rows: int, width: int, device: torch.device) -> _Tables:
        return cls(
            torch.zeros(rows, width, dtype=torch.bool, device=device),
            torch.zeros(rows, width, dtype=torch.int64, device=device),
            torch.zeros(rows, width, dtype=torch.float32, device=device),
            torch.ones(rows, width, dtype=torch.bool, device=device),
            torch.tensor([[0.0, 0.0, 1.0]], dtype=torch.float64, device=device).repeat(rows, 1),
        )


def _mask_ids(logits: Tensor, columns: Tensor) -> Tensor:
    """-inf at `columns` [M, n] of each row; columns outside the shard are ignored."""
    inside = (columns >= 0) & (columns < logits.shape[1])
    mask = torch.zeros(logits.shape, dtype=torch.int64, device=logits.device)
    mask.scatter_add_(1, torch.where(inside, columns, 0), inside.to(torch.int64))
    return logits.masked_fill(mask > 0, -torch.inf)
