# SPDX-License-Identifier: Apache-2.0
"""Which form the caches' rows have, and their bytes; no torch here, so the engine plans with it.

fp8 rows are laid out, written and read by `kernels.quant`. A latent row of R values takes the e4m3
values, an fp32 scale for each 128 of them and the roped key in 16 bits; an index row of 128 values
takes those and one scale.
"""

from __future__ import annotations

from typing import Literal

from glmserve.config import PAGE_SIZE, EngineConfig
from glmserve.errors import ConfigError
from glmserve.model_config import ModelConfig

CacheFormat = Literal["model", "fp8"]  # the model's dtype | fp8 rows

LATENT_GROUP = 128  # latent values of a scale
ROPE_DIM = 64
INDEX_DIM = 128
INDEX_PAGE = 64  # slots whose index keys lie together
_LARGE_LATENT = 512  # GLM's; smaller models take fp8 rows when asked, not by themselves


def fp8_serves(model: ModelConfig) -> bool:
    """Whether fp8 rows fit the model's sizes."""
    sizes = (model.qk_rope_head_dim, model.index_head_dim, PAGE_SIZE)
    return sizes == (ROPE_DIM, INDEX_DIM, INDEX_PAGE) and model.kv_lora_rank % LATENT_GROUP == 0


def choose_format(engine: EngineConfig, model: ModelConfig) -> CacheFormat:
    """The format for the setting `kv_dtype`: "auto" takes fp8 on CUDA in bf16 with GLM's latents.

    Raises ConfigError when fp8 is asked for and does not fit the model.
    """
    fits = fp8_serves(model)
    if engine.kv_dtype == "fp8" and not fits:
        sizes = f"{model.kv_lora_rank}, {model.qk_rope_head_dim}, {model.index_head_dim}"
        raise ConfigError(
            "kv_dtype",
            engine.kv_dtype,
            f"needs a kv_lora_rank of {LATENT_GROUP}s, qk_rope_head_dim {ROPE_DIM} and "
            f"index_head_dim {INDEX_DIM}; the model has {sizes}",
        )
    if engine.kv_dtype == "auto":
        large = fits and model.kv_lora_rank == _LARGE_LATENT
        return "fp8" if large and engine.device == "cuda" and engine.dtype == "bf16" else "model"
    return engine.kv_dtype


def row_bytes(model: ModelConfig, form: CacheFormat, item: int) -> tuple[int, int]:
    """Bytes of a latent row and of an index row; in the model's dtype `item` bytes a number."""
    if form == "fp8":
        latent = model.kv_lora_rank + 4 * model.kv_lora_rank // LATENT_GROUP + 2 * ROPE_DIM
        return latent, INDEX_DIM + 4
    return item * model.latent_dim, item * model.index_head_dim
