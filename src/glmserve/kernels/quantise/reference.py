# SPDX-License-Identifier: Apache-2.0
"""s = max|x| / 448 by groups of 128 columns, values = e4m3(x / s), rounded to nearest even.

Both divisions are products with a reciprocal, which every device rounds alike."""

from __future__ import annotations

from typing import NamedTuple

import torch

GROUP = 128
E4M3_MAX = 448.0
SMALLEST_SCALE = 1e-30  # of a group of zeros; keeps x / s finite


class QuantRows(NamedTuple):
    """Rows in fp8 with one scale for each 128 columns: x[r, c] = values[r, c] * scales[c/128, r].

    Groups come first in `scales`, so that the scales of neighbouring rows are one load.
    """

    values: torch.Tensor  # [R, K] e4m3
    scales: torch.Tensor  # [K / 128, R] fp32


def quantise(x: torch.Tensor) -> QuantRows:
    rows, width = x.shape
    groups = x.to(torch.float32).view(rows, width // GROUP, GROUP)
    scales = (groups.abs().amax(-1) * (1.0 / E4M3_MAX)).clamp_min(SMALLEST_SCALE)
    values = (groups * scales.reciprocal()[..., None]).to(torch.float8_e4m3fn)
    return QuantRows(values.view(rows, width), scales.t().contiguous())


def dequantise(x: QuantRows) -> torch.Tensor:
    """[R, K] fp32."""
    rows, width = x.values.shape
    wide = x.values.to(torch.float32).view(rows, width // GROUP, GROUP)
    return (wide * x.scales.t()[..., None]).view(rows, width)
