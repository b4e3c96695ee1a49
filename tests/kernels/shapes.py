# SPDX-License-Identifier: Apache-2.0
"""Named shapes of operator tests: GLM's ratios, sizes that divide nothing, one row, one head."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch


@dataclass(frozen=True)
class Shape:
    rows: int
    heads: int
    nope: int
    rope: int
    v: int
    q_lora: int
    kv_lora: int
    index_heads: int
    index_dim: int
    topk: int
    hidden: int


SHAPES = {
    "R5-H8-glm-ratios": Shape(5, 8, 48, 16, 64, 64, 64, 8, 32, 16, 128),
    "R7-H3-odd-dims": Shape(7, 3, 24, 10, 33, 55, 41, 5, 39, 7, 95),
    "R1-H1-single": Shape(1, 1, 8, 4, 8, 12, 16, 1, 8, 3, 24),
    "R130-H2-many-rows": Shape(130, 2, 12, 8, 20, 28, 36, 3, 16, 11, 40),
}

all_shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
all_dtypes = pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["fp64", "fp32", "bf16"]
)


def key(dtype: torch.dtype) -> str:
    """Tolerance of an operator that runs in `dtype`."""
    names = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16"}
    return f"operator_{names[dtype]}"


class Draw:
    """Seeded tensors of one test."""

    def __init__(self, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *size: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
        x = torch.randn(size, generator=self.generator, dtype=torch.float64) * scale
        return x.to(dtype)

    def ints(self, high: int, *size: int) -> torch.Tensor:
        return torch.randint(high, size, generator=self.generator)

    def permutation(self, n: int) -> torch.Tensor:
        return torch.randperm(n, generator=self.generator)
