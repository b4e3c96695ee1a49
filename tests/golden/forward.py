# SPDX-License-Identifier: Apache-2.0
"""Checkpoints whose numbers come from raw PCG64 bytes: the same bits on every machine and version.

Their goldens (`forward-<preset>.npz`, made by `make_forward.py`) are committed, so that a machine
with a GPU needs neither transformers nor gigabytes: it makes the weights again and checks their
hash. Every projection is exactly an e4m3 value times a power of two for its 128 x 128 block, so a
bf16 and a block-fp8 checkpoint hold the same numbers and share a golden.

KEYS of the npz (T rows, L layers; G = full layers then the MTP layer; M = routed ones likewise)
  tokens[T + 1]  digest  kept[K] rows that states are stored of
  hidden_layers[L,K,D]  final_hidden[K,D]  mtp_hidden[K,D]  logits[K,V]  mtp_logits[K,V]
  chosen[G,T - topk,T / 8] bits of the rows that leave something out
  scored[S] rows (of those) with index scores  score_margins[G,S,T] (score - boundary) / deviation
  experts[M,T,k]  expert_weights[M,T,k]  expert_margins[M,T,E] sigmoid + bias - boundary
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from glmserve.checkpoint.layout import TensorSpec, checkpoint_tensors
from glmserve.model_config import ModelConfig

HERE = Path(__file__).resolve().parent
SEED = 520
BLOCK = 128
_SHARD_BYTES = 1 << 30

_COMMON: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1,
    "index_share_for_mtp_iteration": True,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 8_000_000, "rope_type": "default"},
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 4096,
    "eos_token_id": [1, 2, 3],
    "pad_token_id": 1,
}
CONFIGS: dict[str, dict[str, Any]] = {
    # GLM's heads in a small model
    "block": _COMMON
    | {
        "vocab_size": 1024,
        "hidden_size": 512,
        "intermediate_size": 512,
        "moe_intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "q_lora_rank": 256,
        "index_topk": 128,
        "n_routed_experts": 32,
        "indexer_types": ["full", "full", "shared", "full"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
    # GLM-5.2's layers as one rank of eight holds them: 8 heads, 1536 of the dense columns, whole
    # experts of 2048, the true index and latent sizes, top-2048. Few experts and layers.
    "glm": _COMMON
    | {
        "vocab_size": 2048,
        "hidden_size": 6144,
        "intermediate_size": 1536,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "q_lora_rank": 2048,
        "index_topk": 2048,
        "n_routed_experts": 16,
        "indexer_types": ["full", "shared", "full"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
}
CONFIGS["pair"] = CONFIGS["block"] | {"num_attention_heads": 16}  # 8 heads for each of two ranks
ROWS = {"block": 256, "pair": 256, "glm": 2176}  # T: more than the index keeps

_PLAIN = ("embed_tokens", "lm_head", "mlp.gate.", "weights_proj", "eh_proj")


def config_of(preset: str) -> ModelConfig:
    return ModelConfig.from_dict(CONFIGS[preset])


def golden_file(preset: str) -> Path:
    return HERE / f"forward-{preset}.npz"


def raw_bytes(name: str, count: int) -> np.ndarray[Any, Any]:
    """`count` int8 numbers of a stream of the name's own."""
    seed = int.from_bytes(hashlib.sha256(f"{SEED}:{name}".encode()).digest()[:8], "little")
    words = np.random.PCG64(seed).random_raw(-(-count // 8))
    return words.astype("<u8", copy=False).view(np.int8)[:count]


def tokens_of(preset: str) -> Tensor:
    """[T + 1] int64."""
    draw = raw_bytes("tokens", 2 * (ROWS[preset] + 1)).view(np.uint16).astype(np.int64)
    return torch.from_numpy(4 + draw % (CONFIGS[preset]["vocab_size"] - 4))


def is_projection(name: str, spec: TensorSpec) -> bool:
    """Whether a block-fp8 checkpoint stores it in fp8."""
    return len(spec.shape) == 2 and not any(part in name for part in _PLAIN)


def _e4m3_of_int8() -> Tensor:
    """What each int8 becomes, by its byte."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.int8)
    return numbers.float().to(torch.float8_e4m3fn)


def step(spec: TensorSpec) -> int:
    """-log2 of what one step of int8, which spreads by 74, is worth: about 1 / sqrt(inputs)."""
    return round(5.7 + math.log2(spec.shape[1]) / 2)


def block_exponents(name: str, spec: TensorSpec) -> Tensor:
    """log2 of the scales [ceil(out / 128), ceil(in / 128)]: two neighbouring values."""
    rows, columns = (-(-n // BLOCK) for n in spec.shape)
    base = -step(spec)
    bits = raw_bytes(name + ":scales", rows * columns).reshape(rows, columns) & 1
    return torch.from_numpy(base - bits.astype(np.int32))


def stored(name: str, spec: TensorSpec, fp8: bool) -> dict[str, Tensor]:
    """The tensors of the checkpoint that stand for `name`."""
    codes = raw_bytes(name, int(np.prod(spec.shape)))
    if is_projection(name, spec):
        values = _e4m3_of_int8()[torch.from_numpy(codes.view(np.uint8).astype(np.int32))]
        values = values.view(spec.shape)
        scales = torch.exp2(block_exponents(name, spec).float())
        if fp8:
            return {name: values, name + "_scale_inv": scales}
        rows, columns = spec.shape
        spread = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)
        return {name: values.bfloat16() * spread[:, :columns].bfloat16()}
    x = torch.from_numpy(codes.astype(np.float32)).view(spec.shape)
    if name.endswith("e_score_correction_bias"):
        return {name: 34.0 + x * 2.0**-11}  # as released: far below a bf16 step
    if name.endswith("k_norm.bias"):
        x = x * 2.0**-8
    elif len(spec.shape) == 1:
        x = 1.0 + x * 2.0**-8
    elif "embed_tokens" in name:
        x = x * 2.0**-7
    else:
        x = x * 2.0 ** -step(spec)
    return {name: x.bfloat16()}


def digest(config: ModelConfig) -> str:
    """Of all raw numbers and of what int8 becomes: equal digests mean equal weights."""
    total = hashlib.blake2b(_e4m3_of_int8().view(torch.uint8).numpy().tobytes(), digest_size=16)
    for name, spec in sorted(checkpoint_tensors(config).items()):
        total.update(raw_bytes(name, int(np.prod(spec.shape))).data)
        if is_projection(name, spec):
            total.update(block_exponents(name, spec).numpy().tobytes())
    return total.hexdigest()


def _shards(config: ModelConfig, fp8: bool) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, spec in checkpoint_tensors(config).items():
        parts = stored(name, spec, fp8)
        shard |= parts
        size += sum(t.nbytes for t in parts.values())
        if size > _SHARD_BYTES:
            yield shard
            shard, size = {}, 0
    yield shard


def write_checkpoint(directory: Path, preset: str, fp8: bool) -> None:
    """A checkpoint of the preset in shards, projections in bf16 or in block-fp8."""
    directory.mkdir(parents=True)
    raw = dict(CONFIGS[preset])
    if fp8:
        raw["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
        }
    (directory / "config.json").write_text(json.dumps(raw))
    places: dict[str, str] = {}
    for i, shard in enumerate(_shards(config_of(preset), fp8)):
        file = f"model-{i:05d}.safetensors"
        save_file(shard, directory / file, metadata={"format": "pt"})
        places |= dict.fromkeys(shard, file)
    index = {"metadata": {}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
