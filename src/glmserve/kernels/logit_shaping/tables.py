# SPDX-License-Identifier: Apache-2.0
"""What shapes the logits of a device row, a line each: settings, and tokens counted so far.

Columns are those of the vocabulary shard; bit c & 31 of word c >> 5 stands for column c.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

MOST_WORDS, LONGEST_WORD = 256, 32
SHAPED, LISTED, WORDS = 1, 2, 4  # flags: anything at all, a list of allowed ids, bad words
NO_TOKEN = -2  # before a sequence's first token; no word asks for it


@dataclass(frozen=True)
class ShapingTables:
    """Lines are device rows; a line whose flags are 0 leaves logits alone."""

    flags: Tensor  # [lines] int32
    penalties: Tensor  # [lines, 3] fp64: presence, frequency, repetition
    counts: Tensor  # [lines, width] int32, of the output's tokens
    bias: Tensor  # [lines, width] fp32
    in_prompt: Tensor  # [lines, ceil(width / 32)] int32 bits
    allowed: Tensor  # the same, read where LISTED is set
    words: Tensor  # [lines, MOST_WORDS, LONGEST_WORD] int32: ends at the right, -1 before
    recent: Tensor  # [lines, LONGEST_WORD] int32: the row's last tokens, newest at the right

    @classmethod
    def make(cls, lines: int, width: int, device: torch.device) -> Self:
        bits = -(-width // 32)

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(lines, *shape, dtype=dtype, device=device)

        return cls(
            zeros(),
            zeros(3, dtype=torch.float64) + torch.tensor([0.0, 0.0, 1.0], device=device),
            zeros(width),
            zeros(width, dtype=torch.float32),
            zeros(bits),
            zeros(bits),
            zeros(MOST_WORDS, LONGEST_WORD) - 1,
            zeros(LONGEST_WORD) + NO_TOKEN,
        )
