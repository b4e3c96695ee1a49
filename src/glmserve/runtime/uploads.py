# SPDX-License-Identifier: Apache-2.0
"""Host arrays to device tensors: everything that a step brings, in one copy from pinned memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_ALIGN = 16  # bytes: what a kernel may assume of a pointer

_DTYPES: dict[str, torch.dtype] = {
    "int64": torch.int64,
    "int32": torch.int32,
    "float64": torch.float64,
}


def upload(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[Tensor]:
    """The arrays (int64, int32, float64) as tensors on `device`.

    Asynchronous on CUDA: torch keeps the pinned buffer until the copy is done.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    starts, total = [], 0
    for array in arrays:
        starts.append(total)
        total += -(-array.nbytes // _ALIGN) * _ALIGN
    buffer = torch.empty(max(total, 1), dtype=torch.uint8, pin_memory=True)
    raw = buffer.numpy()
    for array, start in zip(arrays, starts, strict=True):
        raw[start : start + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).ravel()
    there = buffer.to(device, non_blocking=True)
    return [
        there[start : start + array.nbytes].view(_DTYPES[array.dtype.name]).view(array.shape)
        for array, start in zip(arrays, starts, strict=True)
    ]
