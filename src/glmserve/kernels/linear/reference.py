# SPDX-License-Identifier: Apache-2.0
"""y = x W^T; a block-fp8 weight is dequantised, and rows that arrive in fp8 likewise."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..quantise.reference import GROUP, QuantRows, dequantise, quantise


class QuantWeight(NamedTuple):
    """A weight in fp8 with a scale for each 128 x 128 block: w = values * scales of its block."""

    values: torch.Tensor  # [N, K] e4m3
    scales: torch.Tensor  # [ceil(N / 128), K / 128] fp32


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x, weight)


def quant_linear(x: torch.Tensor | QuantRows, weight: QuantWeight) -> torch.Tensor:
    """[R, N] fp32, not yet rounded."""
    rows = x if isinstance(x, QuantRows) else quantise(x)
    return torch.nn.functional.linear(dequantise(rows), dequantise_weight(weight))


def dequantise_weight(weight: QuantWeight) -> torch.Tensor:
    """[N, K] fp32."""
    rows, columns = weight.values.shape
    blocks = weight.scales.repeat_interleave(GROUP, 0)[:rows].repeat_interleave(GROUP, 1)
    return weight.values.to(torch.float32) * blocks[:, :columns]


def quantise_weight(weight: torch.Tensor) -> QuantWeight:
    """The inverse: scale = max|w| / 448 of each block. For tests, benchmarks, synthetic weights."""
    rows, columns = weight.shape
    tall = -(-rows // GROUP) * GROUP
    padded = weight.new_zeros(tall, columns, dtype=torch.float32)
    padded[:rows] = weight
    blocks = padded.view(tall // GROUP, GROUP, columns // GROUP, GROUP)
    scales = (blocks.abs().amax((1, 3)) / 448.0).clamp_min(1e-30)
    values = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return QuantWeight(values.view(tall, columns)[:rows].contiguous(), scales)


def added(parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Parts [C, ...] of a product added in order."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total.to(dtype)
