# SPDX-License-Identifier: Apache-2.0
"""`ModelConfig`: the sizes and switches of one GlmMoeDsa checkpoint, read from its config.json.

Everything is checked here once, so that the model, the checkpoint reader and the scheduler take the
values as they are. Not its job: how the engine runs (ranks, pages, dtype), which is `EngineConfig`.
Knows neither torch nor the tensors' names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from glmserve.errors import ConfigError

ExpertLayout = Literal[
    "ep", "sliced"
]  # whole experts per rank | every expert cut along its columns
EXPERT_LAYOUTS: tuple[ExpertLayout, ...] = ("ep", "sliced")

ARCHITECTURE = "GlmMoeDsaForCausalLM"
MODEL_TYPE = "glm_moe_dsa"

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "n_routed_experts",
    "num_experts_per_tok",
    "n_shared_experts",
    "max_position_embeddings",
)

# Keys whose behaviour is built into the operators: another value would be computed wrongly, so it
# is refused. A missing key (or null) means the value shown.
_FIXED: tuple[tuple[str, Any], ...] = (
    ("hidden_act", "silu"),
    ("scoring_func", "sigmoid"),
    ("topk_method", "noaux_tc"),
    ("moe_router_dtype", "float32"),
    ("norm_topk_prob", True),
    ("n_group", 1),
    ("topk_group", 1),
    ("moe_layer_freq", 1),
    ("rope_interleave", True),
    ("indexer_rope_interleave", True),
    ("attention_bias", False),
    ("mlp_bias", False),
    ("tie_word_embeddings", False),
)


@dataclass(frozen=True)
class ModelConfig:
    """Sizes in elements, counts in layers, heads, experts or tokens; names as in config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    routed_scaling_factor: float
    indexer_types: tuple[str, ...]  # "full" | "shared", one a target layer
    mlp_layer_types: tuple[str, ...]  # "dense" | "sparse", one a target layer
    num_nextn_predict_layers: int  # MTP layers in the checkpoint, 0 or 1
    index_share_for_mtp_iteration: bool
    eos_token_id: tuple[int, ...]
    pad_token_id: int | None
    quant_method: str | None  # of `quantization_config`, None when the weights are plain

    @classmethod
    def from_file(cls, path: str | Path) -> ModelConfig:
        """Reads a config.json. Raises ConfigError when it is unreadable or cannot be served."""
        try:
            raw = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError("config.json", str(path), f"cannot be read: {error}") from error
        if not isinstance(raw, dict):
            raise ConfigError("config.json", type(raw).__name__, "must be a JSON object")
        return cls.from_dict(raw)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Builds a config from the parsed JSON. Raises ConfigError naming the key and its value."""
        _check_architecture(raw)
        _check_fixed(raw)
        sizes = {key: _positive_int(raw, key) for key in _SIZES}
        layers = sizes["num_hidden_layers"]
        mtp = raw.get("num_nextn_predict_layers") or 0
        if mtp not in (0, 1):
            raise ConfigError("num_nextn_predict_layers", mtp, "must be 0 or 1")
        config = cls(
            **sizes,
            rms_norm_eps=_positive_float(raw, "rms_norm_eps"),
            rope_theta=_rope_theta(raw),
            routed_scaling_factor=_positive_float(raw, "routed_scaling_factor"),
            indexer_types=_indexer_types(raw, layers),
            mlp_layer_types=_mlp_layer_types(raw, layers),
            num_nextn_predict_layers=int(mtp),
            index_share_for_mtp_iteration=bool(raw.get("index_share_for_mtp_iteration", False)),
            eos_token_id=_token_ids(raw, "eos_token_id", sizes["vocab_size"]),
            pad_token_id=next(iter(_token_ids(raw, "pad_token_id", sizes["vocab_size"])), None),
            quant_method=_quant_method(raw),
        )
        _check_consistency(config, raw)
        return config

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Width of a main cache row: the normed latent, then the roped shared key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def num_mtp_layers(self) -> int:
        return self.num_nextn_predict_layers

    @property
    def shared_intermediate_size(self) -> int:
        return self.moe_intermediate_size * self.n_shared_experts

    def is_full(self, layer: int) -> bool:
        """Whether the layer owns an indexer; an MTP layer (index >= num_hidden_layers) does."""
        return layer >= self.num_hidden_layers or self.indexer_types[layer] == "full"

    def is_moe(self, layer: int) -> bool:
        """Whether the layer's FFN is routed; an MTP layer's is."""
        return layer >= self.num_hidden_layers or self.mlp_layer_types[layer] == "sparse"

    @cached_property
    def full_layers(self) -> tuple[int, ...]:
        """Target layers that own an indexer and an index-K cache, ascending."""
        return tuple(i for i, kind in enumerate(self.indexer_types) if kind == "full")

    def check_ranks(self, ranks: int, expert_layout: str) -> None:
        """Raises ConfigError when the model cannot be cut into `ranks` equal shares."""
        if ranks not in (1, 2, 4, 8):
            raise ConfigError("ranks", ranks, "must be 1, 2, 4 or 8")
        if expert_layout not in EXPERT_LAYOUTS:
            raise ConfigError("expert_layout", expert_layout, f"must be one of {EXPERT_LAYOUTS}")
        cut = {
            "num_attention_heads": self.num_attention_heads,
            "vocab_size": self.vocab_size,
            "intermediate_size": self.intermediate_size,
        }
        if "sparse" in self.mlp_layer_types or self.num_mtp_layers:
            cut["moe_intermediate_size * n_shared_experts"] = self.shared_intermediate_size
            if expert_layout == "ep":
                cut["n_routed_experts"] = self.n_routed_experts
            else:
                cut["moe_intermediate_size"] = self.moe_intermediate_size
        for key, value in cut.items():
            if value % ranks:
                raise ConfigError(key, value, f"is not divisible by {ranks} ranks")


def _check_architecture(raw: Mapping[str, Any]) -> None:
    names = raw.get("architectures")
    if names is not None and ARCHITECTURE not in names:
        raise ConfigError("architectures", names, f"only {ARCHITECTURE} is served")
    kind = raw.get("model_type")
    if kind is not None and kind != MODEL_TYPE:
        raise ConfigError("model_type", kind, f"only {MODEL_TYPE} is served")
    if names is None and kind is None:
        raise ConfigError("architectures", None, f"must name {ARCHITECTURE}")


def _check_fixed(raw: Mapping[str, Any]) -> None:
    for key, value in _FIXED:
        got = raw.get(key)
        if got is not None and got != value:
            raise ConfigError(key, got, f"only {value!r} is served")


def _positive_int(raw: Mapping[str, Any], key: str) -> int:
    value = raw.get(key)
    if key == "n_shared_experts" and value is None:
        value = 1
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(key, value, "must be a positive integer")
    return value


def _positive_float(raw: Mapping[str, Any], key: str) -> float:
    value = raw.get(key)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
        raise ConfigError(key, value, "must be a positive number")
    return float(value)


def _rope_theta(raw: Mapping[str, Any]) -> float:
    """`rope_parameters.rope_theta` (new form) or `rope_theta` (old form); they may not disagree."""
    if raw.get("rope_scaling"):
        raise ConfigError("rope_scaling", raw["rope_scaling"], "scaled RoPE is not served")
    nested = raw.get("rope_parameters") or {}
    if not isinstance(nested, Mapping):
        raise ConfigError("rope_parameters", nested, "must be an object")
    kind = nested.get("rope_type", "default")
    if kind != "default":
        raise ConfigError("rope_parameters.rope_type", kind, "only 'default' is served")
    flat = raw.get("rope_theta")
    if "rope_theta" in nested and flat is not None and float(flat) != float(nested["rope_theta"]):
        raise ConfigError(
            "rope_theta", flat, f"contradicts rope_parameters.rope_theta = {nested['rope_theta']}"
        )
    return _positive_float(nested if "rope_theta" in nested else raw, "rope_theta")


def _indexer_types(raw: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """`indexer_types`, else the F/S pattern, else the freq/offset formula, else all full."""
    key, value = "indexer_types", raw.get("indexer_types")
    if value is not None:
        types = list(value)
    elif raw.get("index_topk_pattern") is not None:
        key, value = "index_topk_pattern", raw["index_topk_pattern"]
        types = [{"F": "full", "S": "shared"}.get(c, c) for c in value]
    else:
        key, value = "index_topk_freq", raw.get("index_topk_freq")
        freq = 1 if value is None else value  # GLM-5 and 5.1 name none: every layer is full
        if not isinstance(freq, int) or freq < 1:
            raise ConfigError(key, value, "must be a positive integer")
        offset = raw.get("index_skip_topk_offset")
        offset = 2 if offset is None else offset
        if not isinstance(offset, int):
            raise ConfigError("index_skip_topk_offset", offset, "must be an integer")
        types = ["full" if max(i - offset + 1, 0) % freq == 0 else "shared" for i in range(layers)]
    if len(types) != layers:
        raise ConfigError(key, value, f"has {len(types)} entries for {layers} layers")
    if any(t not in ("full", "shared") for t in types):
        raise ConfigError(key, value, "entries must be full or shared")
    if types[0] != "full":
        raise ConfigError(key, value, "the first layer must be full: it has nothing to share")
    return tuple(types)


def _mlp_layer_types(raw: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    dense = raw.get("first_k_dense_replace")
    if dense is not None and (not isinstance(dense, int) or dense < 0):
        raise ConfigError("first_k_dense_replace", dense, "must be an integer >= 0")
    derived = None
    if dense is not None:
        derived = tuple("dense" if i < dense else "sparse" for i in range(layers))
    given = raw.get("mlp_layer_types")
    if given is None:
        if derived is None:
            raise ConfigError("first_k_dense_replace", None, "must be an integer >= 0")
        return derived
    types = tuple(given)
    if len(types) != layers or any(t not in ("dense", "sparse") for t in types):
        raise ConfigError("mlp_layer_types", given, f"must be {layers} times dense or sparse")
    if derived is not None and types != derived:
        raise ConfigError("mlp_layer_types", given, f"contradicts first_k_dense_replace = {dense}")
    return types


def _token_ids(raw: Mapping[str, Any], key: str, vocab_size: int) -> tuple[int, ...]:
    value = raw.get(key)
    ids = () if value is None else tuple(value) if isinstance(value, (list, tuple)) else (value,)
    for i in ids:
        if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < vocab_size:
            raise ConfigError(key, value, f"token ids must lie in [0, {vocab_size})")
    return ids


def _quant_method(raw: Mapping[str, Any]) -> str | None:
    quantization = raw.get("quantization_config")
    if not quantization:
        return None
    return str(quantization.get("quant_method", "unknown"))


def _check_consistency(config: ModelConfig, raw: Mapping[str, Any]) -> None:
    qk = raw.get("qk_head_dim")
    if qk is not None and qk != config.qk_head_dim:
        raise ConfigError("qk_head_dim", qk, "is not qk_nope_head_dim + qk_rope_head_dim")
    kv_heads = raw.get("num_key_value_heads")
    if kv_heads is not None and kv_heads != config.num_attention_heads:
        raise ConfigError("num_key_value_heads", kv_heads, "must equal num_attention_heads")
    if config.qk_rope_head_dim % 2:
        raise ConfigError("qk_rope_head_dim", config.qk_rope_head_dim, "must be even (pairs)")
    if config.index_head_dim < config.qk_rope_head_dim:
        raise ConfigError(
            "index_head_dim", config.index_head_dim, "is smaller than qk_rope_head_dim"
        )
    if config.num_experts_per_tok > config.n_routed_experts:
        raise ConfigError(
            "num_experts_per_tok", config.num_experts_per_tok, "is larger than n_routed_experts"
        )
