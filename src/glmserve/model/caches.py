# SPDX-License-Identifier: Apache-2.0
"""Paged caches of one rank: all layers' latents, the full layers' index keys, the MTP layer's two.

One page table serves them all, so slot s of every tensor belongs to the same token (the MTP entry
made from hidden i and token i + 1 lies in the slot of i + 1). Ranks hold identical copies. Not its
job: which pages are whose (the engine's page pool).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from glmserve.errors import ConfigError
from glmserve.kernels.quant import (
    INDEX_DIM,
    INDEX_PAGE,
    INDEX_ROW_BYTES,
    LATENT_GROUP,
    ROPE_DIM,
    latent_row_bytes,
)
from glmserve.model_config import ModelConfig

CacheFormat = Literal["model", "fp8"]  # the model's dtype | rows as `kernels.quant` lays them out
_LARGE_LATENT = 512  # GLM's; smaller models take fp8 rows when asked, not by themselves


@dataclass(frozen=True)
class LayerCache:
    latent: Tensor  # [slots, kv_lora + rope], fp8: uint8 [slots, latent_row_bytes]
    index_k: Tensor | None  # [slots, index_head_dim], fp8: uint8 [slots, 132]; full layers only


def fp8_serves(config: ModelConfig, page_size: int) -> bool:
    """Whether the fp8 rows of `kernels.quant` fit the model."""
    sizes = (config.qk_rope_head_dim, config.index_head_dim, page_size)
    fixed = (ROPE_DIM, INDEX_DIM, INDEX_PAGE)
    return sizes == fixed and config.kv_lora_rank % LATENT_GROUP == 0


def choose_format(
    wanted: str, config: ModelConfig, page_size: int, dtype: torch.dtype, device: torch.device
) -> CacheFormat:
    """The format for the setting `kv_dtype`: "auto" takes fp8 on CUDA in bf16 with GLM's
    latents.

    Raises ConfigError when fp8 is asked for and does not fit the model.
    """
    fits = fp8_serves(config, page_size)
    if wanted == "fp8" and not fits:
        sizes = f"{config.kv_lora_rank}, {config.qk_rope_head_dim}, {config.index_head_dim}"
        raise ConfigError(
            "kv_dtype",
            wanted,
            f"needs a kv_lora_rank of {LATENT_GROUP}s, qk_rope_head_dim {ROPE_DIM} and "
            f"index_head_dim {INDEX_DIM}; the model has {sizes}",
        )
    if wanted == "auto":
        large = fits and config.kv_lora_rank == _LARGE_LATENT
        return "fp8" if large and dtype == torch.bfloat16 and device.type == "cuda" else "model"
    assert wanted in ("model", "fp8"), wanted
    return "fp8" if wanted == "fp8" else "model"


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
        widths = (config.latent_dim, config.index_head_dim)
        if cache_format == "fp8":
            assert fp8_serves(config, page_size), (config.latent_dim, config.index_head_dim)
            widths = (latent_row_bytes(config.kv_lora_rank), INDEX_ROW_BYTES)
            dtype = torch.uint8

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
