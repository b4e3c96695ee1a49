# SPDX-License-Identifier: Apache-2.0
"""Reading config.json: released models, the index pattern's three sources, and what is refused."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from glmserve.errors import ConfigError
from glmserve.model_config import ModelConfig

GLM_5_2: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "vocab_size": 154880,
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "head_dim": 192,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "index_topk_pattern": None,
    "index_share_for_mtp_iteration": True,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_router_dtype": "float32",
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 8_000_000, "rope_type": "default"},
    "rope_interleave": True,
    "indexer_rope_interleave": True,
    "attention_bias": False,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 1048576,
    "eos_token_id": [154820, 154827, 154829],
    "pad_token_id": 154820,
}


def without(*keys: str) -> dict[str, Any]:
    return {k: v for k, v in GLM_5_2.items() if k not in keys}


def test_glm_5_2() -> None:
    c = ModelConfig.from_dict(GLM_5_2)
    assert c.full_layers == (0, 1, 2, *range(6, 75, 4))
    assert len(c.full_layers) == 21
    assert c.is_full(78)
    assert c.is_moe(78)
    assert not c.is_moe(2)
    assert c.is_moe(3)
    assert (c.qk_head_dim, c.latent_dim, c.rope_theta) == (256, 576, 8e6)
    assert c.eos_token_id == (154820, 154827, 154829)
    assert c.num_mtp_layers == 1
    assert pickle.loads(pickle.dumps(c)) == c


def test_glm_5_names_no_schedule_so_every_layer_is_full() -> None:
    raw = without("index_topk_freq", "index_skip_topk_offset", "rope_parameters")
    c = ModelConfig.from_dict({**raw, "rope_theta": 1e6, "max_position_embeddings": 202752})
    assert len(c.full_layers) == 78
    assert c.rope_theta == 1e6


def test_types_overrule_the_pattern_and_the_pattern_overrules_the_formula() -> None:
    small = {**GLM_5_2, "num_hidden_layers": 5}
    assert ModelConfig.from_dict(small).full_layers == (0, 1, 2)
    pattern = {**small, "index_topk_pattern": "FSFSS"}
    assert ModelConfig.from_dict(pattern).full_layers == (0, 2)
    types = {**pattern, "indexer_types": ["full", "shared", "shared", "full", "shared"]}
    assert ModelConfig.from_dict(types).full_layers == (0, 3)


def test_scalar_stop_token_and_no_mtp() -> None:
    c = ModelConfig.from_dict(
        {**without("num_nextn_predict_layers", "pad_token_id"), "eos_token_id": 5}
    )
    assert c.eos_token_id == (5,)
    assert c.pad_token_id is None
    assert c.num_mtp_layers == 0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architectures", ["DeepseekV3ForCausalLM"]),
        ("model_type", "glm5_next"),
        ("scoring_func", "softmax"),
        ("topk_method", "greedy"),
        ("n_group", 8),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("rope_interleave", False),
        ("indexer_rope_interleave", False),
        ("norm_topk_prob", False),
        ("tie_word_embeddings", True),
        ("moe_layer_freq", 2),
        ("hidden_size", 0),
        ("vocab_size", "many"),
        ("index_topk", None),
        ("num_key_value_heads", 8),
        ("qk_head_dim", 192),
        ("qk_rope_head_dim", 63),
        ("index_head_dim", 32),
        ("num_experts_per_tok", 257),
        ("num_nextn_predict_layers", 2),
        ("indexer_types", ["full"] * 77),
        ("indexer_types", ["shared"] * 78),
        ("indexer_types", ["sometimes"] * 78),
        ("index_topk_pattern", "FSX"),
        ("index_topk_freq", 0),
        ("first_k_dense_replace", -1),
        ("mlp_layer_types", ["dense"] * 4 + ["sparse"] * 74),
        ("eos_token_id", [154880]),
        ("rms_norm_eps", 0),
        ("rope_theta", 1e6),  # contradicts rope_parameters
        ("rope_scaling", {"type": "yarn"}),
    ],
)
def test_what_cannot_be_served_is_refused_by_key_and_value(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict({**GLM_5_2, key: value})
    assert caught.value.key == key
    assert caught.value.value == value


def test_scaled_rope_is_refused() -> None:
    raw = {**GLM_5_2, "rope_parameters": {"rope_theta": 8e6, "rope_type": "yarn"}}
    with pytest.raises(ConfigError, match=r"rope_parameters\.rope_type = 'yarn'"):
        ModelConfig.from_dict(raw)


def test_unreadable_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelConfig.from_file(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("[1, 2")
    with pytest.raises(ConfigError, match="cannot be read"):
        ModelConfig.from_file(tmp_path / "config.json")
    (tmp_path / "config.json").write_text(json.dumps(GLM_5_2))
    assert ModelConfig.from_file(tmp_path / "config.json").hidden_size == 6144


@pytest.mark.parametrize(
    ("change", "ranks", "layout", "key"),
    [
        ({}, 3, "ep", "ranks"),
        ({}, 8, "dense", "expert_layout"),
        ({"num_attention_heads": 60, "num_key_value_heads": 60}, 8, "ep", "num_attention_heads"),
        ({"vocab_size": 154884}, 8, "ep", "vocab_size"),
        ({"n_routed_experts": 252}, 8, "ep", "n_routed_experts"),
        ({"moe_intermediate_size": 2052, "n_shared_experts": 2}, 8, "sliced", "moe_intermediate"),
    ],
)
def test_ranks_that_do_not_divide_the_model_are_refused(
    change: dict[str, Any], ranks: int, layout: str, key: str
) -> None:
    config = ModelConfig.from_dict({**GLM_5_2, **change})
    with pytest.raises(ConfigError, match=key):
        config.check_ranks(ranks, layout)


@pytest.mark.parametrize("layout", ["ep", "sliced"])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_glm_divides_by_every_width(ranks: int, layout: str) -> None:
    ModelConfig.from_dict(GLM_5_2).check_ranks(ranks, layout)
