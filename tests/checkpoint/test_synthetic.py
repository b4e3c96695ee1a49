# SPDX-License-Identifier: Apache-2.0
"""Synthetic checkpoints: reproducible, complete, readable here and by the reference library."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from glmserve.checkpoint import commands
from glmserve.checkpoint.declared import open_source
from glmserve.checkpoint.formats import Scheme
from glmserve.checkpoint.layout import checkpoint_tensors
from glmserve.checkpoint.quantiser import FORMATS
from glmserve.checkpoint.synthetic import PRESETS, make_checkpoint
from glmserve.errors import ConfigError
from glmserve.model_config import ModelConfig


def digests(directory: Path) -> dict[str, str]:
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in directory.iterdir()}


def test_the_same_seed_gives_the_same_bytes_and_another_does_not(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_checkpoint(tmp_path / name, "tiny", seed)
    a, b, c = (digests(tmp_path / name) for name in "abc")
    assert a == b
    assert a.keys() == c.keys()
    weights = [name for name in a if name.endswith(".safetensors")]
    assert len(weights) >= 2
    assert all(a[name] != c[name] for name in weights)


def test_files_of_a_checkpoint(tmp_path: Path) -> None:
    config = make_checkpoint(tmp_path, "tiny", 3)
    assert config == ModelConfig.from_file(tmp_path / "config.json")
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert tuple(generation["eos_token_id"]) == config.eos_token_id
    assert len(config.eos_token_id) == 3
    assert (generation["temperature"], generation["top_p"]) == (1.0, 0.95)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / name).is_file()
    weight_map = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert weight_map.keys() == checkpoint_tensors(config).keys()
    for name, file in weight_map.items():
        with safe_open(tmp_path / file, "pt") as source:
            wide = name.endswith("e_score_correction_bias")
            assert source.get_tensor(name).dtype == (torch.float32 if wide else torch.bfloat16)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_presets_divide_by_eight_ranks(preset: str) -> None:
    sizes = PRESETS[preset]
    shares = ("vocab_size", "num_attention_heads", "intermediate_size", "n_routed_experts")
    assert all(sizes[key] % 8 == 0 for key in (*shares, "moe_intermediate_size"))


def test_an_unknown_preset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="preset = 'huge'"):
        make_checkpoint(tmp_path, "huge")


def test_transformers_reads_it_and_agrees(tmp_path: Path) -> None:
    """Independent of the goldens: their generator writes its own files."""
    transformers = pytest.importorskip("transformers", minversion="5.24")
    from tests.model.ranks import batch_of, load

    make_checkpoint(tmp_path, "tiny", 4)
    model = load(tmp_path, torch.float32)
    theirs = transformers.GlmMoeDsaForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    tokens = torch.randint(0, 1000, (60,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        wanted = theirs(input_ids=tokens[None], use_cache=False).logits[0]
        table = torch.tensor([[2]], dtype=torch.int32)
        got = model.logits(model.decoder.forward(batch_of(tokens, 0, table), model.caches))
    assert (got.argmax(-1) == wanted.argmax(-1)).all()


@pytest.mark.parametrize("format", ["fp8", "int4", "awq"])
def test_a_quantised_checkpoint_declares_what_it_stores(tmp_path: Path, format: str) -> None:
    make_checkpoint(tmp_path, "tiny", 3, format)
    stored = open_source(str(tmp_path))
    declared = open_source(str(tmp_path), files=False)
    assert stored.headers is not None
    quantised = 0
    for name, weight in stored.weights.items():
        want = declared.weights[name]
        if ".layers.8." in name and format != "fp8":
            continue  # released integer checkpoints keep the MTP layer plain, these do not
        assert (weight.scheme, weight.bits, weight.group) == (want.scheme, want.bits, want.group)
        quantised += weight.scheme is not Scheme.PLAIN
    assert quantised >= 5 * 16 * 3
    plain = make_checkpoint(tmp_path / "plain", "tiny", 3)
    assert plain == dataclasses.replace(stored.config, quant_method=None)


def test_the_command_offers_every_format(tmp_path: Path) -> None:
    assert set(commands.FORMATS) == set(FORMATS)
    assert set(commands.PRESETS) == set(PRESETS)
    with pytest.raises(ConfigError, match="format = 'int4-g128': groups of 128"):
        make_checkpoint(tmp_path, "tiny", 0, "int4-g128")
