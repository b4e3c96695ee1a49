# SPDX-License-Identifier: Apache-2.0
"""On a GPU: threaded loading gives the CPU's bits; synthetic ranks are cuts of one whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from glmserve.checkpoint import reader
from glmserve.checkpoint.loader import copies
from glmserve.checkpoint.reader import open_share
from glmserve.checkpoint.synthetic import make_checkpoint
from glmserve.checkpoint.synthetic_weights import synthetic_share
from glmserve.checkpoint.weights import ModelWeights
from glmserve.config import EngineConfig
from glmserve.engine.gpu_memory import gpu_memory
from glmserve.model_config import ExpertLayout, ModelConfig

pytestmark = pytest.mark.gpu


def leaves(node: Any) -> Iterator[Tensor]:
    if isinstance(node, Tensor):
        yield node
    elif isinstance(node, tuple):
        for item in node:
            yield from leaves(item)
    elif is_dataclass(node):
        for field in fields(node):
            yield from leaves(getattr(node, field.name))


def bits(x: Tensor) -> Tensor:
    return x.cpu().contiguous().view(torch.uint8)


def load(directory: Path, device: str, size: int, layout: ExpertLayout) -> ModelWeights:
    config = ModelConfig.from_file(directory / "config.json")
    share = open_share(directory, config, size - 1, size, layout, torch.bfloat16, device, keep=True)
    weights = share.load()
    assert weights.parameter_bytes == share.memory_bytes
    return weights


@pytest.mark.parametrize("format", ["bf16", "fp8", "int4", "int4-g128", "int4-int8", "awq"])
def test_a_gpu_holds_the_bits_that_a_cpu_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    make_checkpoint(tmp_path, "block", 6, format)
    monkeypatch.setattr(reader, "copies", partial(copies, chunk=1 << 20))  # many chunks a tensor
    for size, layout in ((1, "ep"), (2, "sliced"), (8, "ep")):
        want = load(tmp_path, "cpu", size, layout)  # type: ignore[arg-type]
        got = load(tmp_path, "cuda", size, layout)  # type: ignore[arg-type]
        pairs = list(zip(leaves(want), leaves(got), strict=True))
        assert len(pairs) > 80
        for a, b in pairs:
            assert b.is_cuda
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            assert torch.equal(bits(a), bits(b))


def test_a_bf16_model_on_a_gpu_keeps_its_weights_quantised(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "block", 6, "fp8")
    config = ModelConfig.from_file(tmp_path / "config.json")
    bf16 = open_share(tmp_path, config, 0, 1, "ep", torch.bfloat16, "cuda")
    fp32 = open_share(tmp_path, config, 0, 1, "ep", torch.float32, "cuda")
    assert bf16.memory_bytes < 0.45 * fp32.memory_bytes


def test_synthetic_ranks_are_cuts_of_the_same_numbers(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "block", 6, "fp8")
    whole = synthetic_share(str(tmp_path), 0, 1, "ep", torch.bfloat16, "cuda").load()
    part = synthetic_share(str(tmp_path), 1, 2, "ep", torch.bfloat16, "cuda").load()
    for a, b in zip(leaves(whole.layers[5].ffn), leaves(part.layers[5].ffn), strict=False):
        if a.ndim == 3:
            assert torch.equal(bits(a[len(a) // 2 :]), bits(b))
    assert torch.equal(whole.head[len(whole.head) // 2 :], part.head)
    assert all(bool(t.float().isfinite().all()) for t in leaves(whole))


def test_the_drivers_tool_tells_what_is_free() -> None:
    config = EngineConfig("none", device="cuda", dtype="bf16", collectives="nccl", num_pages=0)
    free, total = torch.cuda.mem_get_info()
    assert gpu_memory(config) == pytest.approx(free, abs=0.2 * total)
