# SPDX-License-Identifier: Apache-2.0
"""A whole forward on kernels, MTP layer included, against transformers' numbers, on a GPU.

`block` is a small model with GLM's heads, `glm` has the layers of GLM-5.2 as one rank of eight
holds them (8 heads: the kernels' own form), with the index keeping 2048 of up to 2176 positions.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from glmserve.cache_format import CacheFormat
from glmserve.kernels.dispatch import allow_reference
from glmserve.kernels.linear import QuantWeight
from tests.golden import forward
from tests.model.forward_golden import check_choices, check_states, load_golden, load_model, run
from tests.model.kernel_launches import launched

pytestmark = pytest.mark.gpu
EVERY_PASS = {
    "describe_rows", "embed_rows", "residual_norm_rows", "split_norm_write", "turn_index_query",
    "score", "look_up", "head_product", "score_parts", "choose_experts", "sort_pairs",
    "read_latents", "attend_dense", "swiglu_rows", "combine_rows", "mtp_rows", "few_rows",
    "many_rows",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_reference() -> None:
    allow_reference(False)  # a shape that no kernel serves is an error


@pytest.mark.timeout(280)
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("preset", ["block", "glm"])
def test_kernels_equal_the_golden(tmp_path: Path, preset: str, fp8: bool) -> None:
    """fp8: block-fp8 weights and fp8 caches."""
    golden, device = load_golden(preset), torch.device("cuda")
    forward.write_checkpoint(tmp_path / "c", preset, fp8)
    cache: CacheFormat = "fp8" if fp8 else "model"
    model = load_model(tmp_path / "c", preset, torch.bfloat16, device, cache, keep=fp8)
    assert isinstance(model.decoder.weights.layers[1].attention.o_proj, QuantWeight) == fp8
    assert (model.caches.layers[0].latent.dtype == torch.uint8) == fp8
    with launched() as kernels:
        result = run(model, preset, golden)
    missing = EVERY_PASS | ({"attend", "quantise_rows"} if fp8 else {"attend_bf16"})
    missing -= set(kernels)
    assert not missing, f"never launched: {missing}"
    key = "forward_fp8" if fp8 else "forward_bf16"
    check_states(golden, result, key)
    check_choices(golden, result, key)
