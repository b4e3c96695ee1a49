# SPDX-License-Identifier: Apache-2.0
"""The caches' tensors, and chunks through fp8 caches."""

from __future__ import annotations

from pathlib import Path

import torch

from glmserve.checkpoint.reader import load_weights
from glmserve.config import PAGE_SIZE
from glmserve.model.caches import Caches
from glmserve.model.decoder import Decoder
from glmserve.parallel.group import SingleGroup
from tests.golden import forward
from tests.model.ranks import batch_of
from tests.tolerances import assert_close

CPU = torch.device("cpu")
CONFIG = forward.config_of("block")


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
