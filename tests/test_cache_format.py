# SPDX-License-Identifier: Apache-2.0
"""When the caches are fp8, and that their rows are those of the kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from glmserve import cache_format
from glmserve.cache_format import CacheFormat, choose_format, row_bytes
from glmserve.checkpoint.declared import open_source
from glmserve.config import EngineConfig
from glmserve.errors import ConfigError
from glmserve.kernels import quant

GLM = open_source("glm-5.2-fp8", files=False).config
NARROW = replace(GLM, kv_lora_rank=256)
GPU: dict[str, Any] = {"device": "cuda", "dtype": "bf16", "collectives": "nccl"}


def chosen(model: Any, **settings: Any) -> CacheFormat:
    return choose_format(EngineConfig("none", **settings), model)


def test_auto_is_fp8_on_a_gpu_in_bf16_with_latents_as_large_as_glms() -> None:
    assert chosen(GLM, **GPU) == "fp8"
    assert chosen(GLM, **GPU | {"dtype": "fp64"}) == "model"
    assert chosen(GLM, dtype="bf16") == "model"
    assert chosen(NARROW, **GPU) == "model"


def test_a_format_that_is_asked_for_is_taken_where_it_fits() -> None:
    assert chosen(GLM, **GPU, kv_dtype="model") == "model"
    assert chosen(GLM, kv_dtype="fp8") == "fp8"
    assert chosen(NARROW, **GPU, kv_dtype="fp8") == "fp8"
    with pytest.raises(ConfigError, match="kv_dtype = .fp8.: .* kv_lora_rank of 128s.*has 192"):
        chosen(replace(GLM, kv_lora_rank=192), **GPU, kv_dtype="fp8")


@pytest.mark.parametrize("model", [GLM, NARROW], ids=["glm", "narrow"])
def test_fp8_rows_are_those_of_the_kernels(model: Any) -> None:
    """The kernels know nothing of the project, so the sizes are written down twice."""
    latent = quant.latent_row_bytes(model.kv_lora_rank)
    assert row_bytes(model, "fp8", 2) == (latent, quant.INDEX_ROW_BYTES)
    for name in ("LATENT_GROUP", "ROPE_DIM", "INDEX_DIM", "INDEX_PAGE"):
        assert getattr(cache_format, name) == getattr(quant, name), name
