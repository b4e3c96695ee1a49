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

Arrays = Sequence[npt.NDArray[Any]]


class Upload:
    """Device tensors with the values of host arrays (int64, int32, float64).

    Asynchronous on CUDA: torch keeps a pinned buffer until its copy is done.
    """

    def __init__(self, arrays: Arrays, device: torch.device) -> None:
        self._starts = [0]
        for array in arrays:
            self._starts.append(self._starts[-1] + -(-array.nbytes // _ALIGN) * _ALIGN)
        self._there = torch.empty(max(self._starts[-1], 1), dtype=torch.uint8, device=device)
        self.tensors: list[Tensor] = [
            self._there[start : start + array.nbytes]
            .view(_DTYPES[array.dtype.name])
            .view(array.shape)
            for array, start in zip(arrays, self._starts, strict=False)
        ]
        self.refill(arrays)

    def refill(self, arrays: Arrays) -> None:
        """Other values, of the same shapes, for the same tensors."""
        pinned = self._there.is_cuda
        buffer = torch.empty(len(self._there), dtype=torch.uint8, pin_memory=pinned)
        raw = buffer.numpy()
        for array, start in zip(arrays, self._starts, strict=False):
            raw[start : start + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).ravel()
        self._there.copy_(buffer, non_blocking=True)


def upload(arrays: Arrays, device: torch.device) -> list[Tensor]:
    """The arrays as tensors on `device`."""
    return Upload(arrays, device).tensors
