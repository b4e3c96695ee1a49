# SPDX-License-Identifier: Apache-2.0
"""The twin's parameters under the released names, written as a checkpoint and read back.

The layout's table (`glmserve.checkpoint.layout`) decides names and shapes; a parameter that it does
not know, or a missing one, is an error here.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from glmserve.checkpoint.layout import checkpoint_tensors
from glmserve.checkpoint.safetensors_header import INDEX_NAME
from glmserve.model_config import ModelConfig
from tools.tiny.sizes import SIZES, raw_config
from tools.tiny.tokens import make_tokenizer
from tools.tiny.twin import Layer, Mlp, Moe, Twin

SHARDS = 2
CONFIG_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


def parameters(twin: Twin) -> dict[str, Tensor]:
    """Every tensor of the checkpoint by its released name: views of the twin's own."""
    out: dict[str, Tensor] = {
        "model.embed_tokens.weight": twin.embed_tokens,
        "model.norm.weight": twin.norm,
        "lm_head.weight": twin.lm_head,
    }
    for number, layer in enumerate(twin.layers):
        assert isinstance(layer, Layer)
        for name, value in _layer(layer):
            out[f"model.layers.{number}.{name}"] = value
    prefix = f"model.layers.{twin.config.num_hidden_layers}."
    out[prefix + "enorm.weight"] = twin.enorm
    out[prefix + "hnorm.weight"] = twin.hnorm
    out[prefix + "eh_proj.weight"] = twin.eh_proj
    out[prefix + "shared_head.norm.weight"] = twin.shared_head_norm
    table = checkpoint_tensors(twin.config)
    assert out.keys() == table.keys(), sorted(out.keys() ^ table.keys())
    for name, spec in table.items():
        assert tuple(out[name].shape) == spec.shape, (name, out[name].shape, spec.shape)
    return {name: value.detach() for name, value in out.items()}


def _layer(layer: Layer) -> list[tuple[str, Tensor]]:
    a = layer.self_attn
    out: list[tuple[str, Tensor]] = [
        ("input_layernorm.weight", layer.input_layernorm),
        ("post_attention_layernorm.weight", layer.post_attention_layernorm),
    ]
    for name in (
        "q_a_proj",
        "q_a_layernorm",
        "q_b_proj",
        "kv_a_proj_with_mqa",
        "kv_a_layernorm",
        "kv_b_proj",
        "o_proj",
    ):
        out.append((f"self_attn.{name}.weight", getattr(a, name)))
    if a.indexer is not None:
        for name in ("wq_b", "wk", "weights_proj"):
            out.append((f"self_attn.indexer.{name}.weight", getattr(a.indexer, name)))
        out.append(("self_attn.indexer.k_norm.weight", a.indexer.k_norm_weight))
        out.append(("self_attn.indexer.k_norm.bias", a.indexer.k_norm_bias))
    if isinstance(layer.mlp, Moe):
        out.append(("mlp.gate.weight", layer.mlp.router))
        out.append(("mlp.gate.e_score_correction_bias", layer.mlp.bias))
        out += _mlp("mlp.shared_experts.", layer.mlp.shared, 0)
        for expert in range(layer.c.n_routed_experts):
            out += _mlp(f"mlp.experts.{expert}.", layer.mlp.experts, expert)
    else:
        assert isinstance(layer.mlp, Mlp)
        out += _mlp("mlp.", layer.mlp, 0)
    return out


def _mlp(prefix: str, mlp: Mlp, expert: int) -> list[tuple[str, Tensor]]:
    return [
        (f"{prefix}{name}_proj.weight", getattr(mlp, name)[expert])
        for name in ("gate", "up", "down")
    ]


def new_config(directory: Path, sizes: str) -> ModelConfig:
    """Writes config.json, generation_config.json and the tokenizer's files."""
    directory.mkdir(parents=True, exist_ok=True)
    info = make_tokenizer(directory, SIZES[sizes]["vocab_size"])
    raw = raw_config(sizes, list(info.eos_token_ids), info.pad_token_id)
    _write(directory / "config.json", raw)
    _write(
        directory / "generation_config.json",
        {
            "do_sample": True,
            "eos_token_id": raw["eos_token_id"],
            "pad_token_id": raw["pad_token_id"],
            "temperature": 1.0,
            "top_p": 0.95,
        },
    )
    return ModelConfig.from_dict(raw)


def same_config(earlier: Path, directory: Path) -> ModelConfig:
    """Copies what `new_config` wrote: weights belong to one tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in CONFIG_FILES:
        (directory / name).write_bytes((earlier / name).read_bytes())
    return ModelConfig.from_file(directory / "config.json")


def save_weights(twin: Twin, directory: Path) -> int:
    """bf16 shards (the correction bias fp32) and their index; returns the bytes of tensors."""
    stored = {
        name: value.to("cpu", torch.float32 if name.endswith("correction_bias") else torch.bfloat16)
        for name, value in sorted(parameters(twin).items())
    }
    total = sum(value.numel() for value in stored.values())
    shards: list[dict[str, Tensor]] = [{}]
    done = 0
    for name, value in stored.items():
        if done >= total * len(shards) / SHARDS:
            shards.append({})
        shards[-1][name] = value.contiguous().clone()
        done += value.numel()
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, directory / file, metadata={"format": "pt"})
        (directory / file).chmod(0o644)
        weight_map.update(dict.fromkeys(shard, file))
    size = sum(value.numel() * value.element_size() for value in stored.values())
    _write(directory / INDEX_NAME, {"metadata": {"total_size": size}, "weight_map": weight_map})
    return size


@torch.no_grad()
def load_weights(twin: Twin, directory: Path) -> None:
    """Reads what `save_weights` wrote (of the same sizes)."""
    files = sorted(directory.glob("model-*.safetensors"))
    stored = {name: value for file in files for name, value in load_file(file).items()}
    own = parameters(twin)
    assert stored.keys() == own.keys(), sorted(stored.keys() ^ own.keys())
    for name, value in own.items():
        value.copy_(stored[name])


def count(config: ModelConfig) -> int:
    return sum(math.prod(spec.shape) for spec in checkpoint_tensors(config).values())


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
