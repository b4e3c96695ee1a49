# SPDX-License-Identifier: Apache-2.0
"""What requests may change about their logits before temperature, over a vocabulary shard.

Keeps the tables that the operators of kernels/logit_shaping read and advance. Each drawing row
sees the confirmed tokens and the drafts ahead of it in the step, so verification rows are treated
exactly as the same tokens would be without drafts. Tables are made when first asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from glmserve.kernels import logit_shaping as ops
from glmserve.messages import IntArray, RowInit, Shaping


@dataclass(frozen=True)
class DrawingRows:
    """M rows of logits that are drawn from."""

    rows: Tensor  # [M] int64, device row
    positions: Tensor  # [M] int64, of the token to draw
    ahead: Tensor  # [M, k] int64, drafts of this step ahead of it, padded with -1


class LogitShaping:
    """For device rows 0 .. max_rows (the last one is never admitted) and the token ids
    [first, first + width) of this shard."""

    def __init__(self, max_rows: int, first: int, width: int, device: torch.device) -> None:
        self.first, self.width, self.max_rows, self.device = first, width, max_rows, device
        self.tables: ops.ShapingTables | None = None
        self._wanted: set[int] = set()  # rows whose sequence asks for anything, min_tokens too

    def prepare(self) -> None:
        """Makes the tables; call it before a graph with `shape` is captured."""
        if self.tables is None:
            self.tables = ops.ShapingTables.make(self.max_rows + 1, self.width, self.device)

    def wanted(self, rows: Iterable[int]) -> bool:
        """Whether any of the device rows needs `shape`, and `confirm` after it."""
        return not self._wanted.isdisjoint(rows)

    def admit(self, init: RowInit) -> None:
        """Takes a row's settings; forgets those of the row's previous sequence."""
        self._wanted.discard(init.row)
        if init.shaping is not None or init.stops_from > init.prompt_length:
            self._wanted.add(init.row)
        if init.shaping is not None:
            self._fill(init.row, init.shaping)
        elif self.tables is not None:
            self.tables.flags[init.row] = 0

    def shape(
        self, logits: Tensor, drawing: DrawingRows, stops: Tensor, stops_from: Tensor
    ) -> Tensor:
        """Returns logits [M, width] fp32 or wider with every setting applied.

        stops [lines, s] int64 ids (-1 = none) that a device row cannot draw before position
        stops_from [lines].
        """
        if logits.is_cuda:
            self.prepare()  # rows that ask for min_tokens alone have not made tables
        return ops.shape_logits(
            logits,
            self.tables,
            self.first,
            drawing.rows,
            drawing.positions,
            drawing.ahead,
            stops,
            stops_from,
        )

    def confirm(self, rows: Tensor, tokens: Tensor, count: Tensor) -> None:
        """Counts tokens[i, : count[i]] of rows [S], tokens [S, k + 1], count [S]."""
        if self.tables is not None:
            ops.confirm_tokens(self.tables, self.first, rows, tokens, count)

    def _fill(self, row: int, shaping: Shaping) -> None:
        self.prepare()
        tables = self.tables
        assert tables is not None
        flags = ops.SHAPED
        tables.in_prompt[row] = self._bits(shaping.prompt)
        tables.counts[row] = self._to_device(
            np.bincount(self._local(shaping.output), minlength=self.width).astype(np.int32)
        )
        bias = np.zeros(self.width, dtype=np.float32)
        for token, value in shaping.logit_bias:
            if self.first <= token < self.first + self.width:
                bias[token - self.first] += value
        tables.bias[row] = self._to_device(bias)
        if shaping.allowed_token_ids is not None:
            flags |= ops.LISTED
            tables.allowed[row] = self._bits(np.asarray(shaping.allowed_token_ids, dtype=np.int32))
        penalties = (
            shaping.presence_penalty,
            shaping.frequency_penalty,
            shaping.repetition_penalty,
        )
        tables.penalties[row] = self._to_device(np.array(penalties, dtype=np.float64))
        if shaping.bad_word_ids:
            flags |= ops.WORDS
            words = np.full((ops.MOST_WORDS, ops.LONGEST_WORD), -1, dtype=np.int32)
            for line, word in zip(words, shaping.bad_word_ids, strict=False):
                line[len(line) - len(word) :] = word
            tables.words[row] = self._to_device(words)
            history = np.concatenate([shaping.prompt, shaping.output])[-ops.LONGEST_WORD :]
            recent = np.full(ops.LONGEST_WORD, ops.NO_TOKEN, dtype=np.int32)
            recent[ops.LONGEST_WORD - len(history) :] = history
            tables.recent[row] = self._to_device(recent)
        tables.flags[row] = flags

    def _bits(self, tokens: IntArray) -> Tensor:
        """The shard's columns of the tokens, a bit each, int32 words."""
        chosen = np.zeros(-(-self.width // 32) * 32, dtype=np.uint8)
        chosen[self._local(tokens)] = 1
        return self._to_device(np.packbits(chosen, bitorder="little").view(np.int32))

    def _local(self, tokens: IntArray) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Columns of the tokens that this shard has."""
        columns = tokens.astype(np.int64) - self.first
        return columns[(columns >= 0) & (columns < self.width)]

    def _to_device(self, values: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Tensor:
        return torch.from_numpy(values).to(self.device)
