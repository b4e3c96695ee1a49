# SPDX-License-Identifier: Apache-2.0
"""What one rank holds of a model's weights, before any of it is in memory.

Where the numbers come from is the kinds' business: files (`reader`) or a generator
(`synthetic_weights`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from glmserve.checkpoint.placement import Held, memory_bytes
from glmserve.checkpoint.weights import ModelWeights
from glmserve.model_config import ModelConfig


@dataclass(frozen=True)
class Share(ABC):
    """One rank's part of every weight, and the form and place that it will have."""

    config: ModelConfig
    rank: int
    held: Mapping[str, Held]
    dtype: torch.dtype
    device: torch.device | str

    @property
    def memory_bytes(self) -> int:
        """Exact bytes of the parameters in memory, from the shapes alone."""
        return memory_bytes(self.held, self.dtype.itemsize)

    @property
    @abstractmethod
    def origin(self) -> str:
        """Where the numbers come from: the same line means the same numbers."""

    @abstractmethod
    def load(self, on_progress: Callable[[str], None] | None = None) -> ModelWeights:
        """Makes or reads the weights; `on_progress` gets lines with a bar."""
