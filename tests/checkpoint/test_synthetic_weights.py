# SPDX-License-Identifier: Apache-2.0
"""Weights without files: the same for every cut, in the config's format, and worth running."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from glmserve.checkpoint.declared import open_source
from glmserve.checkpoint.placement import held_weights
from glmserve.checkpoint.synthetic import make_checkpoint
from glmserve.checkpoint.synthetic_weights import SyntheticShare
from glmserve.checkpoint.weights import ModelWeights, MoeWeights
from glmserve.errors import ConfigError
from glmserve.kernels.experts import Int4Weight
from glmserve.kernels.linear import QuantWeight, dequantise_weight
from glmserve.model_config import ExpertLayout

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def int4(group: int, symmetric: bool) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "group_size": group, "symmetric": symmetric}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": weights}},
    }


@pytest.fixture(scope="module")
def block(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config of the block preset, cut to three dense layers, a routed one and the MTP layer."""
    directory = tmp_path_factory.mktemp("block")
    make_checkpoint(directory, "block", 0)
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**raw, "num_hidden_layers": 4}))
    return directory


def make(
    block: Path,
    tmp_path: Path,
    quantization: dict[str, Any] | None,
    rank: int = 0,
    size: int = 1,
    layout: ExpertLayout = "ep",
    seed: int = 3,
) -> ModelWeights:
    raw = json.loads((block / "config.json").read_text())
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**raw, "quantization_config": quantization}))
    source = open_source(str(file))
    held = held_weights(source.config, source.weights, rank, size, layout, keep=True)
    share = SyntheticShare(source.config, rank, held, torch.bfloat16, "cpu", seed)
    lines: list[str] = []
    weights = share.load(lines.append)
    assert weights.parameter_bytes == share.memory_bytes
    assert lines[-1].endswith(", 0 s left")
    return weights


def moe(weights: ModelWeights) -> MoeWeights:
    ffn = weights.layers[3].ffn
    assert isinstance(ffn, MoeWeights)
    return ffn


def test_a_rank_makes_its_cut_of_the_same_numbers(block: Path, tmp_path: Path) -> None:
    whole = make(block, tmp_path, FP8)
    part = make(block, tmp_path, FP8, rank=1, size=2)
    assert torch.equal(part.embedding, whole.embedding[1024:])
    a, b = whole.layers[0].attention, part.layers[0].attention
    for one, other in ((a.a_proj, b.a_proj), (a.o_proj, b.o_proj)):
        assert isinstance(one, QuantWeight)
        assert isinstance(other, QuantWeight)
        columns = slice(-other.values.shape[1], None)
        assert torch.equal(one.values[:, columns].float(), other.values.float())
        assert torch.equal(one.scales[:, -other.scales.shape[1] :], other.scales)
    e, f = moe(whole).gate_up, moe(part).gate_up
    assert torch.equal(e[0][16:].float(), f[0].float())
    sliced = moe(make(block, tmp_path, FP8, rank=1, size=2, layout="sliced")).down
    down = moe(whole).down
    assert torch.equal(down[0][..., 128:].float(), sliced[0].float())


def test_fp8_weights_use_the_format(block: Path, tmp_path: Path) -> None:
    weight = make(block, tmp_path, FP8).layers[1].attention.q_b
    assert isinstance(weight, QuantWeight)
    numbers = dequantise_weight(weight)
    assert float(numbers.std()) == pytest.approx(1.1 / 16, rel=0.02)  # 256 inputs
    blocks = numbers.abs().unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).amax((1, 3))
    assert torch.allclose(blocks, weight.scales * 448)


@pytest.mark.parametrize(("group", "symmetric"), [(32, False), (128, True)])
def test_int4_experts_as_the_config_says(
    block: Path, tmp_path: Path, group: int, symmetric: bool
) -> None:
    weights = make(block, tmp_path, int4(group, symmetric), rank=3, size=4)
    experts = moe(weights).gate_up
    assert isinstance(experts, Int4Weight)
    assert experts.scales.shape == (8, 512, 512 // group)
    assert (experts.zeros is None) == symmetric
    assert isinstance(weights.layers[0].attention.o_proj, Tensor)
    assert isinstance(weights.mtp.layer.ffn.gate_up, Tensor)  # type: ignore[union-attr]


def test_another_seed_gives_other_numbers(block: Path, tmp_path: Path) -> None:
    one, same, other = (make(block, tmp_path, None, seed=seed).head for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@pytest.mark.parametrize(
    ("quantization", "key"),
    [
        ({"quant_method": "modelopt"}, "quant_method"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "config_groups"),
        (int4(96, True), "group_size"),
        ({"quant_method": "awq", "bits": 3}, "quantization_config"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused(
    block: Path, tmp_path: Path, quantization: dict[str, Any], key: str
) -> None:
    with pytest.raises(ConfigError, match=key):
        make(block, tmp_path, quantization)
