# SPDX-License-Identifier: Apache-2.0
"""The oracle's parts: transformers' GlmMoeDsa model, an MTP layer assembled from its blocks, hooks.

transformers implements everything but the MTP layer. 5.24.0 is the release whose indexer RoPE and
shared indexers were checked; others are refused by `golden.py`. Not its job: what is recorded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GlmMoeDsaConfig
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as hf

LAYERS = 8
PRESETS: dict[str, dict[str, int]] = {
    # keeps the real ratios nope:rope:v = 3:1:4, rope = half of the index head
    "tiny": {
        "vocab_size": 512,
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
    # v != qk != index dims, to catch stride and split mistakes
    "odd": {
        "vocab_size": 384,
        "hidden_size": 96,
        "intermediate_size": 160,
        "moe_intermediate_size": 48,
        "num_attention_heads": 4,
        "q_lora_rank": 56,
        "kv_lora_rank": 40,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "index_n_heads": 12,
        "index_head_dim": 40,
        "index_topk": 12,
        "n_routed_experts": 12,
        "num_experts_per_tok": 3,
    },
    # real head dims and multiples of 128, for kernels with fixed tile shapes
    "block": {
        "vocab_size": 1024,
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


def make_config(preset: str) -> GlmMoeDsaConfig:
    sizes = PRESETS[preset]
    config = GlmMoeDsaConfig(
        **sizes,
        num_hidden_layers=LAYERS,
        num_key_value_heads=sizes["num_attention_heads"],
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        first_k_dense_replace=3,
        rms_norm_eps=1e-5,
        hidden_act="silu",
        max_position_embeddings=4096,
        attention_bias=False,
        tie_word_embeddings=False,
        rope_parameters={"rope_theta": 8_000_000, "rope_type": "default"},
        index_topk_freq=4,
        index_skip_topk_offset=3,
        index_topk_pattern=None,
        # keys that transformers ignores but real configs carry
        index_share_for_mtp_iteration=True,
        indexer_rope_interleave=True,
        rope_interleave=True,
        num_nextn_predict_layers=1,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        moe_layer_freq=1,
        moe_router_dtype="float32",
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=[1, 2, 3],
    )
    config._attn_implementation = "eager"
    assert config.indexer_types == ["full"] * 3 + ["shared"] * 3 + ["full", "shared"]
    assert config.mlp_layer_types == ["dense"] * 3 + ["sparse"] * 5
    return config


@torch.no_grad()
def fill(module: torch.nn.Module, generator: torch.Generator) -> None:
    """Non-degenerate random values, drawn in name order so that module order does not matter."""
    bias = "e_score_correction_bias"
    buffers = [(n, b) for n, b in module.named_buffers() if n.endswith(bias)]
    for name, tensor in sorted([*module.named_parameters(), *buffers]):
        x = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
        if name.endswith(bias):
            x = 34.0 + 0.08 * x  # as released: steps below a bf16 ULP choose the experts
        elif name.endswith("k_norm.bias"):
            x = 0.3 * x
        elif name.endswith(("norm.weight", "layernorm.weight")):
            x = 1.0 + 0.25 * x
        elif name.endswith("embed_tokens.weight"):
            x = 0.7 * x
        elif name.endswith("gate.weight"):
            x = 1.2 * x / tensor.shape[-1] ** 0.5
        else:
            x = 1.1 * x / tensor.shape[-1] ** 0.5  # gate_up_proj, down_proj are [E, out, in]
        tensor.copy_(x.to(tensor.dtype))


class Mtp(torch.nn.Module):
    """The layer after the last: own full indexer and MoE, fed with (hidden i, token i + 1)."""

    def __init__(self, config: GlmMoeDsaConfig) -> None:
        super().__init__()
        raw = config.to_dict()
        raw.update(
            num_hidden_layers=LAYERS + 1,
            indexer_types=[*config.indexer_types, "full"],
            mlp_layer_types=[*config.mlp_layer_types, "sparse"],
            layer_types=None,
        )
        for key in (
            "index_topk_freq",
            "index_skip_topk_offset",
            "index_topk_pattern",
            "model_type",
            "transformers_version",
        ):
            raw.pop(key, None)
        deeper = GlmMoeDsaConfig(**raw)
        deeper._attn_implementation = "eager"
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = hf.GlmMoeDsaRMSNorm(hidden, eps)
        self.hnorm = hf.GlmMoeDsaRMSNorm(hidden, eps)
        self.eh_proj = torch.nn.Linear(2 * hidden, hidden, bias=False)
        self.block = hf.GlmMoeDsaDecoderLayer(deeper, LAYERS)
        self.norm = hf.GlmMoeDsaRMSNorm(hidden, eps)  # shared_head.norm
        self.rot = hf.GlmMoeDsaRotaryEmbedding(deeper)

    def forward(
        self,
        embeddings: Tensor,
        hidden: Tensor,
        positions: Tensor,
        zero_first: bool,
        topk: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """embeddings[i] = E[t_{i+1}], hidden[i] after the final norm, at position i; recomputes
        everything. With `topk` the indexer is skipped and those indices are used."""
        if zero_first:
            first = positions[..., None] == 0
            embeddings = torch.where(first, torch.zeros_like(embeddings), embeddings)
        x = self.eh_proj(torch.cat([self.enorm(embeddings), self.hnorm(hidden)], -1))
        length = x.shape[1]
        lowest = torch.finfo(x.dtype).min
        mask = torch.full((length, length), lowest, dtype=x.dtype).triu(1)[None, None]
        common = {
            "attention_mask": mask,
            "position_ids": positions,
            "position_embeddings": self.rot(x, positions),
        }
        if topk is None:
            y, indices = self.block(x, **common)
        else:
            attention = self.block.self_attn
            indexer, attention.indexer = attention.indexer, None
            y, indices = self.block(x, **common, prev_topk_indices=topk)
            attention.indexer = indexer
        return self.norm(y), indices

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Its weights under the released names, experts one by one."""
        out: dict[str, Tensor] = {}
        prefix = f"model.layers.{LAYERS}."
        for key, value in self.state_dict().items():
            if key.startswith("block.mlp.experts."):
                for e, one in enumerate(value):
                    base = f"{prefix}mlp.experts.{e}."
                    if key.endswith("gate_up_proj"):
                        gate, up = one.chunk(2, 0)
                        out[base + "gate_proj.weight"] = gate.clone()
                        out[base + "up_proj.weight"] = up.clone()
                    else:
                        out[base + "down_proj.weight"] = one.clone()
            elif not key.startswith("rot"):
                out[self._released_name(key)] = value.clone()
        return out

    def load_checkpoint(self, tensors: dict[str, Tensor]) -> None:
        """The reverse (so that the fp8 golden uses de-quantised MTP weights as well)."""
        base = f"model.layers.{LAYERS}.mlp.experts."
        state = {}
        for key, value in self.state_dict().items():
            if key.startswith("block.mlp.experts."):
                parts = ("gate_proj", "up_proj") if key.endswith("gate_up_proj") else ("down_proj",)
                state[key] = torch.stack(
                    [
                        torch.cat([tensors[f"{base}{e}.{part}.weight"] for part in parts])
                        for e in range(value.shape[0])
                    ]
                )
            elif not key.startswith("rot"):
                state[key] = tensors[self._released_name(key)]
        self.load_state_dict(state, strict=False)

    @staticmethod
    def _released_name(key: str) -> str:
        prefix = f"model.layers.{LAYERS}."
        if key.startswith("block."):
            return prefix + key.removeprefix("block.")
        return prefix + ("shared_head." if key.startswith("norm.") else "") + key


class Recorder:
    """Records each layer's output, selection, index margins and router decisions.

    Margins are gaps between the last kept and the first dropped candidate, one a row that drops
    any: a small one means that rounding may change the set.
    """

    def __init__(self, layers: list[torch.nn.Module]) -> None:
        self.hidden: dict[int, Tensor] = {}
        self.topk: dict[int, Tensor] = {}
        self.routing: dict[int, tuple[Tensor, Tensor]] = {}
        self.index_margin: dict[int, float] = {}
        self.router_margin: dict[int, float] = {}
        self._hooks: list[Any] = []
        for i, layer in enumerate(layers):
            self._attach(i, layer)

    def _attach(self, i: int, layer: torch.nn.Module) -> None:
        def on_layer(module: Any, args: Any, out: Any) -> None:
            self.hidden[i], self.topk[i] = out[0].detach().clone(), out[1].detach().clone()

        def on_gate(module: Any, args: Any, out: Any) -> None:
            self.routing[i] = (out[1].detach().clone(), out[2].detach().clone())
            margin = router_margin(module, out[0])
            self.router_margin[i] = min(margin, self.router_margin.get(i, torch.inf))

        def on_index(module: Any, args: Any, kwargs: Any, out: Any) -> None:
            margin = index_margin(module, *args[:3])
            self.index_margin[i] = min(margin, self.index_margin.get(i, torch.inf))

        self._hooks.append(layer.register_forward_hook(on_layer))
        if hasattr(layer.mlp, "gate"):
            self._hooks.append(layer.mlp.gate.register_forward_hook(on_gate))
        if layer.self_attn.indexer is not None:
            hook = layer.self_attn.indexer.register_forward_hook(on_index, with_kwargs=True)
            self._hooks.append(hook)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def index_scores(indexer: Any, x: Tensor, q_latent: Tensor, rotary: Any) -> Tensor:
    """fp32 scores [S, S] recomputed from the module's weights by an own formula, full prefill."""
    length, rope = x.shape[1], indexer.qk_rope_head_dim
    q = indexer.wq_b(q_latent)[0].view(length, indexer.n_heads, indexer.head_dim).float()
    k = indexer.k_norm(indexer.wk(x))[0].float()
    cos, sin = (t[0, :, : rope // 2].float() for t in rotary)

    def rotated(t: Tensor, c: Tensor, s: Tensor) -> Tensor:
        even, odd = t[..., 0:rope:2], t[..., 1:rope:2]
        out = t.clone()
        out[..., 0:rope:2], out[..., 1:rope:2] = even * c - odd * s, odd * c + even * s
        return out

    q, k = rotated(q, cos[:, None], sin[:, None]), rotated(k, cos, sin)
    weights = indexer.weights_proj(x)[0].float()
    dots = torch.relu(torch.einsum("qhd,kd->qhk", q, k))
    scores = torch.einsum("qh,qhk->qk", weights, dots)
    scores = scores * (indexer.head_dim * indexer.n_heads) ** -0.5
    return scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf)


def index_margin(indexer: Any, x: Tensor, q_latent: Tensor, rotary: Any) -> float:
    scores, k = index_scores(indexer, x, q_latent, rotary), indexer.index_topk
    if scores.shape[0] <= k:
        return torch.inf
    best = scores[k:].topk(k + 1, -1).values
    return (best[:, k - 1] - best[:, k]).min().item()


def router_margin(gate: Any, logits: Tensor) -> float:
    choice = logits.double().sigmoid() + gate.e_score_correction_bias.double()
    best = choice.topk(gate.top_k + 1, -1).values
    return (best[:, -2] - best[:, -1]).min().item()
