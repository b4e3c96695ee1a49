# SPDX-License-Identifier: Apache-2.0
"""config.json of the trained checkpoint, and a smaller one that a CPU can try out."""

from __future__ import annotations

from typing import Any

from glmserve.checkpoint.synthetic import small_config

TINY: dict[str, int] = {
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


CONTEXT = 1024


def raw_config(name: str, eos_token_ids: list[int], pad_token_id: int) -> dict[str, Any]:
    """config.json of one of SIZES."""
    return small_config(SIZES[name], CONTEXT, eos_token_ids, pad_token_id)
