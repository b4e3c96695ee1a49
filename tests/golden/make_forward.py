#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes forward-<preset>.npz (`forward.py`) with transformers in fp32, a layer at a time.

usage:  PYTHONPATH=src:. python tests/golden/make_forward.py [block] [pair] [glm]

glm takes minutes and about 6 GB. Layers are transformers' own; the loop around them is checked
against transformers' whole model on the block preset.
"""

from __future__ import annotations

import copy
import gc
import sys
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import GlmMoeDsaConfig
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as hf

from glmserve.checkpoint.layout import checkpoint_tensors
from tests.golden import forward
from tests.golden.oracle import index_scores

VERIFIED = "5.24.0"
KEPT = 24  # rows that states are stored of
SCORED_EVERY = 4


def hf_config(preset: str, mtp: bool) -> GlmMoeDsaConfig:
    """With `mtp` one layer more, which is what transformers' block needs to be built as one."""
    raw: dict[str, Any] = copy.deepcopy(forward.CONFIGS[preset])
    del raw["architectures"], raw["model_type"]
    if mtp:
        raw["num_hidden_layers"] += 1
        raw["indexer_types"].append("full")
        raw["mlp_layer_types"].append("sparse")
    config = GlmMoeDsaConfig(
        **raw,
        num_key_value_heads=raw["num_attention_heads"],
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        hidden_act="silu",
        attention_bias=False,
        tie_word_embeddings=False,
    )
    config._attn_implementation = "eager"
    assert config.indexer_types == raw["indexer_types"]
    assert config.mlp_layer_types == raw["mlp_layer_types"]
    return config


class Weights:
    """Tensors of the preset in fp32, made when they are asked for."""

    def __init__(self, preset: str) -> None:
        self.specs = checkpoint_tensors(forward.config_of(preset))

    def __getitem__(self, name: str) -> Tensor:
        return forward.stored(name, self.specs[name], fp8=False)[name].float()

    @torch.no_grad()
    def fill(self, module: torch.nn.Module, prefix: str) -> None:
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        for name, tensor in tensors.items():
            if name.endswith("experts.gate_up_proj"):
                base = prefix + name.removesuffix("gate_up_proj")
                for e, one in enumerate(tensor):
                    gate, up = one.chunk(2)
                    gate.copy_(self[f"{base}{e}.gate_proj.weight"])
                    up.copy_(self[f"{base}{e}.up_proj.weight"])
            elif name.endswith("experts.down_proj"):
                base = prefix + name.removesuffix("down_proj")
                for e, one in enumerate(tensor):
                    one.copy_(self[f"{base}{e}.down_proj.weight"])
            elif prefix + name in self.specs:
                tensor.copy_(self[prefix + name])
            else:
                assert "inv_freq" in name, name


class Recorder:
    """What `forward.py` lists, as the layers run."""

    def __init__(self, preset: str) -> None:
        self.config = forward.config_of(preset)
        length, topk = forward.ROWS[preset], self.config.index_topk
        spread = np.linspace(0, length - 1, KEPT - 4).astype(int).tolist()
        self.kept = sorted({*spread, topk - 1, topk, topk + 1, length - 2})
        self.scored = list(range(topk, length, SCORED_EVERY))
        self.arrays: dict[str, list[np.ndarray[Any, Any]]] = {}

    def add(self, key: str, value: Tensor, dtype: Any = np.float16) -> None:
        self.arrays.setdefault(key, []).append(value.detach().numpy().astype(dtype))

    def attach(self, layer: Any) -> list[Any]:
        """Hooks for an indexer and a router."""
        hooks = []
        if layer.self_attn.indexer is not None:
            hooks.append(
                layer.self_attn.indexer.register_forward_hook(self._index, with_kwargs=True)
            )
        if hasattr(layer.mlp, "gate"):
            hooks.append(layer.mlp.gate.register_forward_hook(self._route))
        return hooks

    def _index(self, module: Any, args: Any, kwargs: Any, out: Any) -> None:
        topk = module.index_topk
        scores = index_scores(module, *args[:3])
        best = scores[topk:].topk(topk + 1, -1)
        mask = torch.zeros(scores[topk:].shape, dtype=torch.bool)
        mask.scatter_(1, best.indices[:, :topk], True)
        theirs = torch.zeros_like(mask).scatter_(1, out[0][topk:].long(), True)
        # Our formula and theirs may disagree on near-ties only.
        assert (mask != theirs).float().mean() < 1e-4
        self.arrays.setdefault("chosen", []).append(np.packbits(theirs.numpy(), axis=1))
        boundary = (best.values[:, topk - 1] + best.values[:, topk]) / 2
        some = torch.tensor(self.scored) - topk
        seen = scores[topk:][some]
        finite = seen.masked_fill(seen.isinf(), 0.0)
        count = torch.tensor(self.scored)[:, None] + 1
        mean = finite.sum(1, keepdim=True) / count
        square = (finite - mean).masked_fill(seen.isinf(), 0.0).square().sum(1, keepdim=True)
        deviation = (square / count).sqrt()
        self.add("score_margins", (seen - boundary[some][:, None]) / deviation)

    def _route(self, module: Any, args: Any, out: Any) -> None:
        logits, weights, ids = out[:3]
        choice = logits.double().sigmoid() + module.e_score_correction_bias.double()
        best = choice.topk(module.top_k + 1, -1).values
        self.add("expert_margins", choice - (best[:, -2:-1] + best[:, -1:]) / 2)
        order = ids.sort(-1)
        self.add("experts", order.values, np.uint8)
        self.add("expert_weights", weights.gather(1, order.indices))


def run_layer(
    config: GlmMoeDsaConfig,
    number: int,
    weights: Weights,
    x: Tensor,
    topk: Tensor | None,
    recorder: Recorder,
) -> tuple[Tensor, Tensor]:
    layer = hf.GlmMoeDsaDecoderLayer(config, number).eval()
    weights.fill(layer, f"model.layers.{number}.")
    length = x.shape[1]
    positions = torch.arange(length)[None]
    rotary = hf.GlmMoeDsaRotaryEmbedding(config)(x, positions)
    mask = torch.full((length, length), torch.finfo(x.dtype).min).triu(1)[None, None]
    hooks = recorder.attach(layer)
    given = {} if topk is None else {"prev_topk_indices": topk}
    y, indices = layer(
        x, attention_mask=mask, position_ids=positions, position_embeddings=rotary, **given
    )
    for hook in hooks:
        hook.remove()
    del layer
    gc.collect()
    return y, indices


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    module = hf.GlmMoeDsaRMSNorm(len(weight), eps)
    module.weight.data = weight
    return module(x)


def check_loop(preset: str, weights: Weights, tokens: Tensor, final: Tensor) -> None:
    """transformers' whole model must give what the loop gave."""
    model = hf.GlmMoeDsaForCausalLM(hf_config(preset, mtp=False)).eval()
    weights.fill(model, "")
    whole = model.model(input_ids=tokens[None], use_cache=False).last_hidden_state
    gap = (whole - final).abs().max().item()
    print(f"  whole model against the loop: {gap:.1e}")
    assert gap < 1e-4


@torch.no_grad()
def make(preset: str) -> None:
    config, weights, record = forward.config_of(preset), Weights(preset), Recorder(preset)
    theirs, deeper = hf_config(preset, mtp=False), hf_config(preset, mtp=True)
    layers, eps, kept = config.num_hidden_layers, config.rms_norm_eps, record.kept
    tokens = forward.tokens_of(preset)
    table = weights["model.embed_tokens.weight"]
    x, topk = table[tokens[:-1]][None], None
    for i in range(layers):
        full = config.is_full(i)
        x, topk = run_layer(theirs, i, weights, x, None if full else topk, record)
        record.add("hidden_layers", x[0][kept])
        print(f"  layer {i}: rms {x.square().mean().sqrt():.2f}", flush=True)
    final = norm(x, weights["model.norm.weight"], eps)
    if preset != "glm":
        check_loop(preset, weights, tokens[:-1], final)  # glm's would not fit in memory
    head = weights["lm_head.weight"]
    prefix = f"model.layers.{layers}."
    pair = [
        norm(table[tokens[1:]][None], weights[prefix + "enorm.weight"], eps),
        norm(final, weights[prefix + "hnorm.weight"], eps),
    ]
    u = torch.cat(pair, -1) @ weights[prefix + "eh_proj.weight"].T
    y, _ = run_layer(deeper, layers, weights, u, None, record)
    out = norm(y, weights[prefix + "shared_head.norm.weight"], eps)
    arrays: dict[str, Any] = {key: np.stack(value) for key, value in record.arrays.items()}
    for key, states in (("final_hidden", final), ("mtp_hidden", out)):
        arrays[key] = states[0][kept].numpy().astype(np.float16)
    arrays["logits"] = (final[0][kept] @ head.T).numpy().astype(np.float16)
    arrays["mtp_logits"] = (out[0][kept] @ head.T).numpy().astype(np.float16)
    arrays |= {"tokens": tokens.numpy(), "kept": np.array(kept), "scored": np.array(record.scored)}
    arrays["digest"] = np.array(forward.digest(config))
    assert all(np.isfinite(arrays[key]).all() for key in arrays if "hidden" in key)
    np.savez_compressed(forward.golden_file(preset), **arrays)
    print(f"  {forward.golden_file(preset).name}: {forward.golden_file(preset).stat().st_size:,} B")


def main() -> None:
    if transformers.__version__ != VERIFIED:
        sys.exit(f"transformers {transformers.__version__} is not the verified {VERIFIED}")
    transformers.logging.set_verbosity_error()
    for preset in sys.argv[1:] or forward.CONFIGS:
        print(preset, flush=True)
        make(preset)


if __name__ == "__main__":
    main()
