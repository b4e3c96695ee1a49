# SPDX-License-Identifier: Apache-2.0
"""The one sum over ranks: in rank order, in the accumulator's type, rounded once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from glmserve.errors import EngineError

_ACCUMULATORS = {
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.int32: torch.int32,
    torch.int64: torch.int64,
}


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the type that sums of `dtype` are accumulated in; EngineError if it has none."""
    if dtype not in _ACCUMULATORS:
        raise EngineError(f"all_reduce: {dtype} cannot be summed")
    return _ACCUMULATORS[dtype]


def sum_in_rank_order(parts: Sequence[Tensor]) -> Tensor:
    """Returns ((parts[0] + parts[1]) + parts[2]) + ..., a new tensor in the parts' dtype.

    Explicit additions: a library's sum over an axis may choose another order by shape.
    """
    dtype = parts[0].dtype
    wide = accumulator_dtype(dtype)
    if len(parts) == 1:
        return parts[0].clone()
    total = parts[0].to(wide) + parts[1]
    for part in parts[2:]:
        total += part
    return total.to(dtype)
