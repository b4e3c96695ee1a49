# SPDX-License-Identifier: Apache-2.0
"""config.json of the trained checkpoint, and a smaller one that a CPU can try out."""

from __future__ import annotations

from typing import Any

from glmserve.model_config import ARCHITECTURE, MODEL_TYPE

TINY: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 384,
    "moe_intermediate_size": 64,
    "num_attention_heads": 8,
    "q_lora_rank": 128,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "index_n_heads": 8,
    "index_head_dim": 128,
    "index_topk": 128,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
}
TRIAL = TINY | {
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 16,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "index_n_heads": 8,
    "index_head_dim": 32,
    "index_topk": 32,
}
SIZES = {"tiny": TINY, "trial": TRIAL}


def raw_config(name: str, eos_token_ids: list[int], pad_token_id: int) -> dict[str, Any]:
    """config.json: eight layers, three of them dense, full indexers at 0, 1, 2 and 6, one MTP."""
    sizes = SIZES[name]
    return {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        **sizes,
        "num_hidden_layers": 8,
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
        "max_position_embeddings": 1024,
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
