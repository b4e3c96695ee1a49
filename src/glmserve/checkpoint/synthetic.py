# SPDX-License-Identifier: Apache-2.0
"""Small random checkpoints with everything that a real one has: for tests, CI and first trials.

Weights are drawn so that nothing is degenerate: norms and biases vary, the router's correction bias
lies near 34 as in released models, and the top-k selection changes the logits. Not its job: goldens
(made from transformers by the tests' own script).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from glmserve.checkpoint.layout import TensorSpec, checkpoint_tensors
from glmserve.checkpoint.quantiser import FORMATS, declaration, quantise
from glmserve.checkpoint.safetensors_header import INDEX_NAME
from glmserve.errors import ConfigError
from glmserve.model_config import ARCHITECTURE, MODEL_TYPE, ModelConfig
from glmserve.text.synthetic_tokenizer import write_tokenizer

# Sizes divide by 8 ranks in both expert layouts. "tiny" keeps GLM's ratios between head parts;
# "block" has GLM's own head sizes and multiples of 128 elsewhere, as the kernels' tiles want.
PRESETS: dict[str, dict[str, int]] = {
    "tiny": {
        "vocab_size": 1024,
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_attention_heads": 8,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 48,
        "qk_rope_head_dim": 16,
        "v_head_dim": 64,
        "index_n_heads": 8,
        "index_head_dim": 32,
        "index_topk": 16,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
    },
    "block": {
        "vocab_size": 2048,
        "hidden_size": 512,
        "intermediate_size": 512,
        "moe_intermediate_size": 256,
        "num_attention_heads": 8,
        "q_lora_rank": 256,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 64,
        "n_routed_experts": 32,
        "num_experts_per_tok": 8,
    },
}
LAYERS = 8
CONTEXT = 4096
SHARDS = 3


def make_checkpoint(
    directory: str | Path, preset: str = "tiny", seed: int = 0, format: str = "bf16"
) -> ModelConfig:
    """Writes config.json, generation_config.json, the tokenizer's files and safetensors shards with
    their index, in one of `quantiser.FORMATS`. The same arguments give the same bytes. Raises
    ConfigError."""
    if preset not in PRESETS:
        raise ConfigError("preset", preset, f"must be one of {sorted(PRESETS)}")
    if format not in FORMATS:
        raise ConfigError("format", format, f"must be one of {sorted(FORMATS)}")
    if "128" in format and PRESETS[preset]["moe_intermediate_size"] % 128:
        raise ConfigError("format", format, f"groups of 128 do not divide preset {preset}")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = write_tokenizer(directory, PRESETS[preset]["vocab_size"], seed)
    stops, pad = list(tokenizer.eos_token_ids), tokenizer.pad_token_id
    raw = small_config(PRESETS[preset], CONTEXT, stops, pad) | declaration(format)
    config = ModelConfig.from_dict(raw)
    _write_json(directory / "config.json", raw)
    _write_json(
        directory / "generation_config.json",
        {
            "do_sample": True,
            "eos_token_id": stops,
            "pad_token_id": pad,
            "temperature": 1.0,
            "top_p": 0.95,
        },
    )
    _write_shards(directory, config, torch.Generator().manual_seed(seed), format)
    return config


def random_tensor(name: str, spec: TensorSpec, generator: torch.Generator) -> Tensor:
    """One tensor with the scale that its role needs; bf16, or fp32 for the correction bias."""
    x = torch.randn(spec.shape, generator=generator, dtype=torch.float32)
    if name.endswith("e_score_correction_bias"):
        # Steps of 0.08 around 34 are below a bf16 ULP (0.25): rounding them changes the routing.
        return 34.0 + 0.08 * x
    return scaled(name, x, spec.shape[-1]).to(torch.bfloat16)


def scaled(name: str, x: Tensor, inputs: int) -> Tensor:
    """Standard normal numbers with the scale of their tensor's role; `inputs` of a matrix."""
    if name.endswith("k_norm.bias"):
        return 0.3 * x
    if x.ndim == 1:
        return 1.0 + 0.25 * x
    if name.endswith("embed_tokens.weight"):
        return 0.7 * x
    return 1.1 / math.sqrt(inputs) * x


def small_config(
    sizes: Mapping[str, int], context: int, eos_token_ids: list[int], pad_token_id: int
) -> dict[str, Any]:
    """config.json of a model of `sizes` (as PRESETS): eight layers, three of them dense, full
    indexers at 0, 1, 2 and 6, one MTP layer, a context of so many tokens."""
    return {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        **sizes,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": sizes["num_attention_heads"],
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_router_dtype": "float32",
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "max_position_embeddings": context,
        "rope_parameters": {"rope_theta": 8_000_000, "rope_type": "default"},
        "rope_interleave": True,
        "indexer_rope_interleave": True,
        "index_topk_freq": 4,
        "index_skip_topk_offset": 3,
        "index_topk_pattern": None,
        "index_share_for_mtp_iteration": True,
        "num_nextn_predict_layers": 1,
        "eos_token_id": eos_token_ids,
        "pad_token_id": pad_token_id,
        "bos_token_id": None,
        "dtype": "bfloat16",
    }


def _write_shards(
    directory: Path, config: ModelConfig, generator: torch.Generator, format: str
) -> None:
    """Tensors in name order, cut into SHARDS files of about the same number of elements."""
    specs = dict(sorted(checkpoint_tensors(config).items()))
    total = sum(math.prod(spec.shape) for spec in specs.values())
    shard, done, size = 0, 0, 0
    pending: dict[str, Tensor] = {}
    weight_map: dict[str, str] = {}
    for i, (name, spec) in enumerate(specs.items(), start=1):
        made = quantise({name: random_tensor(name, spec, generator)}, format)
        size += sum(part.numel() * part.element_size() for part in made.values())
        pending |= made
        done += math.prod(spec.shape)
        if i == len(specs) or done * SHARDS >= total * (shard + 1):
            file = f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors"
            save_file(pending, directory / file, metadata={"format": "pt"})
            (directory / file).chmod(0o644)  # it is made 0600; the server may be another user
            weight_map.update(dict.fromkeys(pending, file))
            shard, pending = shard + 1, {}
    _write_json(
        directory / INDEX_NAME, {"metadata": {"total_size": size}, "weight_map": weight_map}
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
