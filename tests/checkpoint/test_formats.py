# SPDX-License-Identifier: Apache-2.0
"""Quantised checkpoints: every rank of every cut holds the numbers that the format stands for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from glmserve.checkpoint.quantiser import FORMATS, quantise
from glmserve.checkpoint.reader import load_weights, open_share
from glmserve.checkpoint.synthetic import make_checkpoint
from glmserve.checkpoint.weights import ModelWeights, MoeWeights
from glmserve.errors import CheckpointError
from glmserve.kernels.experts import Int4Weight
from glmserve.kernels.experts.reference import dequantise_int4
from glmserve.kernels.linear import QuantWeight, dequantise_weight
from glmserve.model_config import ExpertLayout, ModelConfig
from tests.checkpoint.plain_copies import (
    plain_copy,
    quantised_copy,
    read_all,
    shortened,
    write,
)

QUANTISED = sorted(set(FORMATS) - {"bf16"})


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for preset in ("tiny", "block"):
        whole = tmp_path_factory.mktemp(preset)
        make_checkpoint(whole, preset, seed=4)
        found[preset] = shortened(whole, tmp_path_factory.mktemp(f"{preset}-short"))
    return found


@pytest.fixture(scope="module")
def quantised_block(
    sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """The short block checkpoint in a format; each is made once."""

    @functools.cache
    def make(format: str) -> Path:
        return quantised_copy(sources["block"], tmp_path_factory.mktemp(format), format)

    return make


def pairs(a: Any, b: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The leaves of two weight structures side by side: tensors and quantised weights."""
    if isinstance(a, (Tensor, QuantWeight, Int4Weight)) or a is None:
        yield path, a, b
    elif isinstance(a, tuple):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from pairs(x, y, f"{path}[{i}]")
    elif is_dataclass(a):
        for field in fields(a):
            yield from pairs(getattr(a, field.name), getattr(b, field.name), f"{path}.{field.name}")


def load(
    directory: Path,
    rank: int,
    size: int,
    layout: ExpertLayout,
    dtype: torch.dtype,
    keep: bool = False,
) -> ModelWeights:
    config = ModelConfig.from_file(directory / "config.json")
    share = open_share(directory, config, rank, size, layout, dtype, keep=keep)
    weights = share.load()
    assert weights.parameter_bytes == share.memory_bytes
    return weights


@pytest.mark.parametrize("format", QUANTISED)
def test_every_rank_holds_the_dequantised_weights(
    sources: dict[str, Path], tmp_path: Path, format: str
) -> None:
    preset = "block" if format in ("int4-g128", "int4-int8") else "tiny"
    quantised = quantised_copy(sources[preset], tmp_path / "quantised", format)
    plain = plain_copy(quantised, tmp_path / "plain")
    before = load(sources[preset], 0, 1, "ep", torch.float32)
    changed = 0
    cuts: list[tuple[int, int, ExpertLayout]] = [(0, 1, "ep"), (5, 8, "ep"), (3, 4, "sliced")]
    for rank, size, layout in [*cuts, (7, 8, "sliced")]:
        got = load(quantised, rank, size, layout, torch.float32)
        want = load(plain, rank, size, layout, torch.float32)
        for path, a, b in pairs(want, got):
            assert a is b is None or torch.equal(a, b), (path, rank, size, layout)
        if size == 1:
            changed = sum(a is not None and not torch.equal(a, b) for _, a, b in pairs(before, got))
    assert changed >= 4  # at least the experts of two layers are not what they were


def plain_of(weight: Any) -> Tensor:
    """What a kept weight stands for, in bf16."""
    if isinstance(weight, Int4Weight):
        return torch.stack([dequantise_int4(weight, e) for e in range(len(weight.packed))])
    if isinstance(weight, QuantWeight):
        if weight.values.ndim == 2:
            return dequantise_weight(weight).bfloat16()
        return torch.stack(
            [dequantise_weight(QuantWeight(*one)) for one in zip(*weight, strict=True)]
        ).bfloat16()
    assert isinstance(weight, Tensor)
    return weight


@pytest.mark.parametrize("format", ["fp8", "int4", "int4-g128", "awq"])
@pytest.mark.parametrize(
    ("rank", "size", "layout"), [(0, 1, "ep"), (1, 4, "ep"), (1, 2, "sliced"), (5, 8, "sliced")]
)
def test_kept_weights_stand_for_the_same_numbers(
    quantised_block: Callable[[str], Path],
    format: str,
    rank: int,
    size: int,
    layout: ExpertLayout,
) -> None:
    quantised = quantised_block(format)
    kept = load(quantised, rank, size, layout, torch.bfloat16, keep=True)
    plain = load(quantised, rank, size, layout, torch.bfloat16)
    for path, a, b in pairs(plain, kept):
        if a is not None:
            assert torch.equal(a, plain_of(b).to(a.dtype)), path
    ffn = kept.layers[3].ffn
    assert isinstance(ffn, MoeWeights)
    # 256 columns over 8 ranks: 32 of a block of 128, or of a group of 128, are de-quantised.
    whole = size < 8
    if format == "fp8":
        attention = kept.layers[2].attention
        assert isinstance(attention.a_proj, QuantWeight)
        assert attention.a_proj.scales.shape == (7, 4)  # 256 + 576 rows, the last block 64 high
        assert isinstance(attention.q_b, QuantWeight)
        assert isinstance(attention.kv_b, Tensor)
        assert isinstance(attention.indexer.proj, Tensor)  # type: ignore[union-attr]
        assert isinstance(attention.indexer.wq_b, QuantWeight)  # type: ignore[union-attr]
        assert isinstance(ffn.gate_up, QuantWeight if whole else Tensor)
        assert ffn.gate.dtype == torch.bfloat16
    else:
        assert isinstance(ffn.gate_up, Int4Weight if whole else Tensor)
        assert isinstance(ffn.shared.gate_up, Tensor)
    assert type(ffn.gate_up) is type(ffn.down)
    assert ffn.bias.dtype == torch.float32


def test_int8_with_a_scale_a_row(sources: dict[str, Path], tmp_path: Path) -> None:
    tensors = read_all(sources["tiny"])
    name = "model.layers.3.self_attn.o_proj.weight"
    weight = tensors[name].float()
    scale = weight.abs().amax(1, keepdim=True) / 127
    tensors[name] = (weight / scale).round().to(torch.int8)
    tensors[name + "_scale"] = scale
    directory = write(tmp_path, tensors, sources["tiny"])
    got = load(directory, 1, 4, "ep", torch.float32).layers[3].attention.o_proj
    columns = slice(128, 256)
    assert torch.equal(got, tensors[name][:, columns].float() * scale)


def refused(tensors: dict[str, Tensor], tmp_path: Path, like: Path, match: str) -> None:
    directory = write(tmp_path, tensors, like)
    with pytest.raises(CheckpointError, match=match):
        load_weights(
            directory, ModelConfig.from_file(like / "config.json"), 0, 1, "ep", torch.float32
        )


EXPERT = "model.layers.3.mlp.experts.3.down_proj"


def test_nvfp4_is_refused_with_what_to_take_instead(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    tensors = read_all(sources["tiny"])
    tensors[EXPERT + ".weight"] = torch.zeros(128, 32, dtype=torch.uint8)
    tensors[EXPERT + ".weight_scale"] = torch.ones(128, 4).to(torch.float8_e4m3fn)
    tensors[EXPERT + ".weight_scale_2"] = torch.ones(())
    tensors[EXPERT + ".input_scale"] = torch.ones(())
    refused(tensors, tmp_path, sources["tiny"], rf"NVFP4.*block-fp8 or an int4.*{EXPERT}")


def test_fp8_without_its_scales_is_named(sources: dict[str, Path], tmp_path: Path) -> None:
    tensors = quantise(read_all(sources["tiny"]), "fp8")
    del tensors[EXPERT + ".weight_scale_inv"]
    refused(tensors, tmp_path, sources["tiny"], rf"missing: {EXPERT}\.weight_scale_inv")


def test_scales_of_another_block_size_are_named(sources: dict[str, Path], tmp_path: Path) -> None:
    tensors = quantise(read_all(sources["tiny"]), "fp8")
    tensors[EXPERT + ".weight_scale_inv"] = torch.ones(2, 1)
    refused(tensors, tmp_path, sources["tiny"], rf"{EXPERT}.* is \[2, 1\], not \[1, 1\]")


def test_gptq_is_named(sources: dict[str, Path], tmp_path: Path) -> None:
    tensors = quantise(read_all(sources["tiny"]), "awq")
    tensors[EXPERT + ".qweight"] = torch.zeros(8, 128, dtype=torch.int32)  # packed along inputs
    tensors[EXPERT + ".g_idx"] = torch.zeros(64, dtype=torch.int32)
    refused(tensors, tmp_path, sources["tiny"], rf"extra: {EXPERT}\.g_idx.*{EXPERT}\.qweight is")


def test_fp8_beside_a_scale_for_the_whole_tensor_is_named(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    tensors = read_all(sources["tiny"])
    tensors[EXPERT + ".weight"] = torch.zeros(128, 64).to(torch.float8_e4m3fn)
    tensors[EXPERT + ".weight_scale"] = torch.ones(1)
    message = rf"missing: {EXPERT}\.weight_scale_inv; extra: {EXPERT}\.weight_scale"
    refused(tensors, tmp_path, sources["tiny"], message)


def test_one_scheme_in_some_layers_and_another_in_others(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    """What is there decides: a config that names another method changes nothing."""
    plain = read_all(sources["tiny"])
    fp8, int4 = (quantise(plain, format) for format in ("fp8", "int4"))

    def layer(n: int) -> str:
        return f"model.layers.{n}."

    mixed = {k: v for k, v in plain.items() if not k.startswith((layer(3), layer(4)))}
    mixed |= {k: v for k, v in fp8.items() if k.startswith(layer(3))}
    mixed |= {k: v for k, v in int4.items() if k.startswith(layer(4))}
    directory = write(tmp_path / "mixed", mixed, sources["tiny"])
    want = load(plain_copy(directory, tmp_path / "plain"), 0, 2, "ep", torch.float64)
    got = load(directory, 0, 2, "ep", torch.float64)
    for path, a, b in pairs(want, got):
        # The copy holds products rounded to fp32.
        assert a is b is None or torch.allclose(a, b, rtol=1e-7, atol=0.0), path


def test_the_same_headers_have_the_same_checksum(sources: dict[str, Path], tmp_path: Path) -> None:
    config = ModelConfig.from_file(sources["tiny"] / "config.json")

    def digest(directory: Path) -> str:
        return open_share(directory, config, 0, 1, "ep", torch.float32).headers.digest

    assert digest(sources["tiny"]) == digest(sources["tiny"])
    other = quantised_copy(sources["tiny"], tmp_path, "fp8")
    assert digest(sources["tiny"]) != digest(other)
    share = open_share(other, config, 0, 1, "ep", torch.float32)
    save_file({"x": torch.zeros(3)}, other / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors changed"):
        share.headers.check_unchanged()
