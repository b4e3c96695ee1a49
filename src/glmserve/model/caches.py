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

from glmserve.cache_format import CacheFormat, fp8_serves, row_bytes
from glmserve.model_config import ModelConfig


@dataclass(frozen=True)
class LayerCache:
    """One layer's caches; slot s of both belongs to the same token."""

    latent: Tensor  # [slots, kv_lora + rope], fp8: uint8 [slots, latent_row_bytes]
    index_k: Tensor | None  # [slots, index_head_dim], fp8: uint8 [slots, 132]; full layers only


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
        cache_format: CacheFormat = "model",
    ) -> Caches:
        """Zeroed, so that a row that was never written cannot bring a NaN into a masked product.

        fp8 takes latents of 128s with 64 roped dimensions, index keys of 128, pages of 64
        (`fp8_serves`).
        """
        slots = num_pages * page_size
        sizes = row_bytes(config, cache_format, dtype.itemsize)
        if cache_format == "fp8":
            assert fp8_serves(config), (config.latent_dim, config.index_head_dim)
            dtype = torch.uint8
        widths = [size // dtype.itemsize for size in sizes]

        def layer(full: bool) -> LayerCache:
            latent, index_k = (
                torch.zeros(slots, width, dtype=dtype, device=device) if wanted else None
                for width, wanted in zip(widths, (True, full), strict=True)
            )
            assert latent is not None
            return LayerCache(latent, index_k)

        return cls(
            tuple(layer(config.is_full(i)) for i in range(config.num_hidden_layers)),
            layer(full=True) if config.num_mtp_layers else None,
        )
