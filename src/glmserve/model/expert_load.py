# SPDX-License-Identifier: Apache-2.0
"""How many tokens each expert of each routed layer was chosen for, the MTP layer's included.

Counted on the device where the router chooses, on every rank alike (routers are replicated). Rows
that a step computes count, rejected drafts among them; padding does not. Not its job: reading the
counts back, or what they say about balance.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from glmserve.model.layer import DecoderLayer
from glmserve.model_config import ModelConfig


class ExpertLoad:
    """Running totals on the device, one for each expert of each routed layer."""

    def __init__(
        self,
        config: ModelConfig,
        layers: Iterable[DecoderLayer],
        padding: int,
        device: torch.device,
    ) -> None:
        """`layers` in order, the target's and then the MTP layer's; the routed ones count from
        now on. Rows of sequence `padding` are not counted."""
        routed = [layer for layer in layers if layer.routed]
        # [routed layers, n_routed_experts]
        self.totals = torch.zeros(
            len(routed), config.n_routed_experts, dtype=torch.int64, device=device
        )
        for layer, totals in zip(routed, self.totals, strict=True):
            layer.count_choices(totals, padding)
