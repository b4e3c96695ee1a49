# SPDX-License-Identifier: Apache-2.0
"""A pass on CUDA tensors is kernels of ours and nothing else: seen without a GPU, on tensors that
only have shapes, with the launches left out. The launches themselves run on GPUs.

What could not be captured in a CUDA graph would show: torch arithmetic, a read-back (which tensors
of the meta device refuse), a shape that no kernel serves.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from glmserve.cache_format import CacheFormat
from glmserve.checkpoint.formats import Scheme, StoredWeight
from glmserve.checkpoint.layout import checkpoint_tensors
from glmserve.checkpoint.placement import held_weights
from glmserve.checkpoint.safetensors_header import StoredTensor
from glmserve.checkpoint.weights import ModelWeights, allocate
from glmserve.kernels.dispatch import allow_reference
from glmserve.kernels.take_rows import take_rows
from glmserve.model.batch import DenseRows, StepBatch
from glmserve.model.caches import Caches
from glmserve.model.decoder import Decoder
from glmserve.model.mtp import Mtp
from glmserve.model_config import ModelConfig
from glmserve.parallel.group import SingleGroup
from tests.golden import forward
from tests.model.kernel_launches import launched, torch_work

PAGES = 40
ROOT = Path(__file__).resolve().parents[2]


def config_of(preset: str) -> ModelConfig:
    """A golden's config, or that of the trained small checkpoint."""
    if preset == "small":
        return ModelConfig.from_file(ROOT / "checkpoints" / "tiny" / "config.json")
    return forward.config_of(preset)


def fake_weights(preset: str, fp8: bool, ranks: int = 1) -> ModelWeights:
    """Weights that have shapes only, as a checkpoint of that kind would be held."""
    config = config_of(preset)
    stored = {}
    for name, spec in checkpoint_tensors(config).items():
        if fp8 and forward.is_projection(name, spec):
            blocks = tuple(-(-n // 128) for n in spec.shape)
            parts = {
                "values": StoredTensor(forward.HERE, "F8_E4M3", spec.shape),
                "scales": StoredTensor(forward.HERE, "F32", blocks),
            }
            stored[name] = StoredWeight(Scheme.BLOCK_FP8, spec.shape, parts)
        else:
            parts = {"values": StoredTensor(forward.HERE, "BF16", spec.shape)}
            stored[name] = StoredWeight(Scheme.PLAIN, spec.shape, parts)
    held = held_weights(config, stored, 0, ranks, "ep", keep=True)
    return allocate(config, held, torch.bfloat16, "meta")[0]


def fake_batch(rows: int, each: int | None) -> StepBatch:
    lines = rows // (each or rows)

    def integers() -> torch.Tensor:
        return torch.empty(rows, dtype=torch.int64, device="meta")

    table = torch.empty(lines, PAGES, dtype=torch.int32, device="meta")
    return StepBatch(
        integers(), integers(), integers(), table, max_context=2176, rows_per_sequence=each
    )


@pytest.fixture(autouse=True)
def _no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    allow_reference(False)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    # The bound on the latents is read at load, once.
    monkeypatch.setattr(torch.Tensor, "__float__", lambda self: 1.0)


@pytest.mark.parametrize(("rows", "each"), [(1, 1), (12, 6), (24, 1), (700, None)], ids=str)
@pytest.mark.parametrize("cache", ["model", "fp8"])
@pytest.mark.parametrize(
    ("preset", "fp8"), [("glm", True), ("glm", False), ("block", True), ("small", False)]
)
def test_a_pass_launches_kernels_only(
    preset: str, fp8: bool, cache: Literal["model", "fp8"], rows: int, each: int | None
) -> None:
    config, group = config_of(preset), SingleGroup()
    with torch.inference_mode():
        weights = fake_weights(preset, fp8)
        decoder, mtp = Decoder(config, weights, group), Mtp(config, weights, group)
        form: CacheFormat = cache
        caches = Caches.allocate(config, PAGES, 64, torch.bfloat16, "meta", form)
        batch = fake_batch(rows, each)
        with launched(run=False):  # first use makes workspaces and tables
            decoder.forward(batch, caches)
        with launched(run=False) as kernels, torch_work() as torch_calls:
            hidden = decoder.forward(batch, caches)
            logits = decoder.logits(hidden)
            out, selection = mtp.forward(
                batch, batch.tokens, hidden, caches, None, write_index=True
            )
            last = batch.positions[: rows // (each or rows)]
            row = batch.select(last).advance()
            kept = selection.select(last)
            mtp.forward(row, row.tokens, take_rows(out, last), caches, kept, write_index=False)
    assert not torch_calls.found, torch_calls.found
    assert hidden.shape == (rows, config.hidden_size)
    assert logits.shape == (rows, config.vocab_size)
    assert kernels["describe_rows"] == 3
    assert kernels["score"] == len(config.full_layers) + 1  # not in the pass that was given a set


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_rank_of_the_small_checkpoint_launches_kernels_only(ranks: int) -> None:
    """A rank's share of every weight; what the ranks exchange is left out."""
    config, group = config_of("small"), SingleGroup()
    with torch.inference_mode():
        decoder = Decoder(config, fake_weights("small", False, ranks), group)
        caches = Caches.allocate(config, PAGES, 64, torch.bfloat16, "meta", "model")
        for rows, each in ((4, 4), (100, None)):
            batch = fake_batch(rows, each)
            with launched(run=False):
                decoder.forward(batch, caches)
            with launched(run=False), torch_work() as torch_calls:
                logits = decoder.logits(decoder.forward(batch, caches))
            assert not torch_calls.found, torch_calls.found
            assert logits.shape == (rows, config.vocab_size // ranks)


@pytest.mark.parametrize("cache", ["model", "fp8"])
def test_long_chunks_attend_densely_and_the_rest_sparsely(cache: Literal["model", "fp8"]) -> None:
    config, group, rows = forward.config_of("glm"), SingleGroup(), 700
    chunks = (DenseRows(6, 594, 594, line=0), DenseRows(600, 80, 2100, line=0))
    with torch.inference_mode():
        decoder = Decoder(config, fake_weights("glm", fp8=True), group)
        caches = Caches.allocate(config, PAGES, 64, torch.bfloat16, "meta", cache)
        batch = replace(fake_batch(rows, None), dense=chunks)
        with launched(run=False), torch_work():
            decoder.forward(batch, caches)
        with launched(run=False) as kernels, torch_work() as torch_calls:
            hidden = decoder.forward(batch, caches)
    assert hidden.shape == (rows, config.hidden_size)
    layers = config.num_hidden_layers
    assert kernels["attend_dense"] == layers  # the second chunk sees more than the index keeps
    assert torch_calls.found == {"cat": layers}  # copies
