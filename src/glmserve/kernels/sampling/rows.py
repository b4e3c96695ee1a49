# SPDX-License-Identifier: Apache-2.0
"""What rows are drawn with: tables over device rows, and which of them a step draws for."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class SamplingRows:
    """The tables may be strided views and of any number type; operators read them by `rows`."""

    temperature: Tensor  # [lines], 0 = greedy
    top_p: Tensor  # [lines] fp64, 1 = off
    top_k: Tensor  # [lines] integers, 0 = off
    min_p: Tensor  # [lines], 0 = off
    seeds: Tensor  # [lines] int64: the bits of an unsigned number
    rows: Tensor  # [R] integers, table line of each row of logits
    positions: Tensor  # [R] integers, position in the sequence of the token to draw
