# SPDX-License-Identifier: Apache-2.0
"""The caches' formats: what they take, when fp8 is chosen, and chunks through fp8 caches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from glmserve.checkpoint.reader import load_weights
from glmserve.config import PAGE_SIZE
from glmserve.errors import ConfigError
from glmserve.model.caches import Caches, choose_format
from glmserve.model.decoder import Decoder
from glmserve.parallel.group import SingleGroup
from tests.golden import forward
from tests.model.ranks import batch_of
from tests.tolerances import assert_close

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CONFIG = forward.config_of("block")


def test_auto_is_fp8_on_a_gpu_in_bf16_where_the_sizes_fit() -> None:
    bf16 = torch.bfloat16
    assert choose_format("auto", CONFIG, PAGE_SIZE, bf16, CUDA) == "fp8"
    assert choose_format("auto", CONFIG, PAGE_SIZE, bf16, CPU) == "model"
    assert choose_format("auto", CONFIG, PAGE_SIZE, torch.float64, CUDA) == "model"
    assert choose_format("model", CONFIG, PAGE_SIZE, bf16, CUDA) == "model"
    assert choose_format("fp8", CONFIG, PAGE_SIZE, torch.float64, CPU) == "fp8"
    narrow = replace(CONFIG, kv_lora_rank=256)
    assert choose_format("auto", narrow, PAGE_SIZE, bf16, CUDA) == "model"
    assert choose_format("fp8", narrow, PAGE_SIZE, bf16, CUDA) == "fp8"
    with pytest.raises(ConfigError, match="a kv_lora_rank of 128s"):
        choose_format("fp8", replace(CONFIG, kv_lora_rank=192), PAGE_SIZE, bf16, CUDA)


def test_fp8_rows_take_656_and_132_bytes() -> None:
    caches = Caches.allocate(CONFIG, 3, PAGE_SIZE, torch.bfloat16, CPU, "fp8")
    full, shared = caches.layers[1], caches.layers[2]
    assert full.index_k is not None
    assert (full.latent.shape, full.latent.dtype) == ((192, 656), torch.uint8)
    assert (full.index_k.shape, full.index_k.dtype) == ((192, 132), torch.uint8)
    assert shared.index_k is None
    assert caches.mtp is not None


def test_chunks_through_fp8_caches_equal_one_chunk(tmp_path: Path) -> None:
    """What one chunk wrote, another reads: with fp64 sums only the stored codes are coarse."""
    forward.write_checkpoint(tmp_path / "c", "block", fp8=False)
    weights = load_weights(tmp_path / "c", CONFIG, 0, 1, "ep", torch.float64)
    decoder = Decoder(CONFIG, weights, SingleGroup())
    tokens = forward.tokens_of("block")[:180]  # beyond index_topk
    table = torch.tensor([[4, 0, 2]], dtype=torch.int32)

    def hidden(chunk: int) -> torch.Tensor:
        caches = Caches.allocate(CONFIG, 6, PAGE_SIZE, torch.float64, CPU, "fp8")
        parts = [
            decoder.forward(batch_of(tokens[at : at + chunk], at, table), caches)
            for at in range(0, len(tokens), chunk)
        ]
        return torch.cat(parts)

    with torch.inference_mode():
        assert_close("hidden", hidden(180), hidden(77), "same_fp64")
