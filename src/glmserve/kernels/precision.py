# SPDX-License-Identifier: Apache-2.0
"""The one rule for wider arithmetic: fp64 stays fp64, everything else accumulates in fp32."""

from __future__ import annotations

import torch


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """dtype of statistics, softmax, scores and sums for tensors stored as `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32
