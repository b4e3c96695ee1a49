# SPDX-License-Identifier: Apache-2.0
"""Paged caches of one rank: all layers' latents, the full layers' index keys, the MTP layer's two.

One page table serves them all, so slot s of every tensor belongs to the same token (the MTP entry
made from hidden i and token i + 1 lies in the slot of i + 1). Ranks hold identical copies. Not its
job: which pages are whose (the engine's page pool).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from glmserve.model_config import ModelConfig


@dataclass(frozen=True)
class LayerCache:
    latent: Tensor  # [slots, kv_lora + rope]
    index_k: Tensor | None  # [slots, index_head_dim], full layers only


@dataclass(frozen=True)
class Caches:
    """The last page is scratch: padding rows write there, no sequence ever owns it."""

    layers: tuple[LayerCache, ...]
    mtp: LayerCache | None

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> Caches:
        """Zeroed, so that a row that was never written cannot bring a NaN into a masked product."""
        slots = num_pages * page_size

        def layer(full: bool) -> LayerCache:
            return LayerCache(
                torch.zeros(slots, config.latent_dim, dtype=dtype, device=device),
                torch.zeros(slots, config.index_head_dim, dtype=dtype, device=device)
                if full
                else None,
            )

        return cls(
            tuple(layer(config.is_full(i)) for i in range(config.num_hidden_layers)),
            layer(full=True) if config.num_mtp_layers else None,
        )
