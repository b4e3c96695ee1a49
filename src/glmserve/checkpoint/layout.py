# SPDX-License-Identifier: Apache-2.0
"""The one table of a GlmMoeDsa checkpoint: every tensor's name, shape and how ranks cut it.

Files are checked against it, the synthetic writer fills it, and byte accounting sums it. Not its
job: how files store a tensor (`formats`) or how it lies in memory (`placement`, `weights`).
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from glmserve.model_config import ExpertLayout, ModelConfig


class Cut(enum.Enum):
    """How a tensor [out, in] is divided among N ranks; every share is contiguous and equal."""

    WHOLE = "whole"  # every rank holds all of it
    ROWS = "rows"  # out / N rows a rank
    COLUMNS = "columns"  # in / N columns a rank


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the checkpoint: [out, in] or [size], and its share rule."""

    shape: tuple[int, ...]
    cut: Cut = Cut.WHOLE
    expert: int | None = None  # under "ep" the cut does not apply: rank expert // (E / N) holds all
    wide: bool = False  # kept in fp32 or wider: rounding it to bf16 would change the routing


@functools.lru_cache(maxsize=4)  # 59,585 tensors at full size
def checkpoint_tensors(config: ModelConfig, mtp: bool = True) -> Mapping[str, TensorSpec]:
    """Every tensor that the checkpoint must hold, by its full name."""
    tables = {
        "model.embed_tokens.weight": TensorSpec((config.vocab_size, config.hidden_size), Cut.ROWS),
        "model.norm.weight": TensorSpec((config.hidden_size,)),
        "lm_head.weight": TensorSpec((config.vocab_size, config.hidden_size), Cut.ROWS),
    }
    layers = config.num_hidden_layers + (config.num_mtp_layers if mtp else 0)
    for layer in range(layers):
        for name, spec in _layer(config, layer):
            tables[f"model.layers.{layer}.{name}"] = spec
    return MappingProxyType(tables)


def ignored_tensors(config: ModelConfig) -> frozenset[str]:
    """Copies that some checkpoints store beside an MTP layer; the main tables are used instead."""
    return frozenset(
        f"model.layers.{config.num_hidden_layers + i}.{name}.weight"
        for i in range(config.num_mtp_layers)
        for name in ("shared_head.head", "embed_tokens")
    )


def _layer(config: ModelConfig, layer: int) -> Iterator[tuple[str, TensorSpec]]:
    hidden, heads = config.hidden_size, config.num_attention_heads
    latent, q_rank = config.kv_lora_rank, config.q_lora_rank
    yield "input_layernorm.weight", TensorSpec((hidden,))
    yield "post_attention_layernorm.weight", TensorSpec((hidden,))
    yield "self_attn.q_a_proj.weight", TensorSpec((q_rank, hidden))
    yield "self_attn.q_a_layernorm.weight", TensorSpec((q_rank,))
    yield (
        "self_attn.q_b_proj.weight",
        TensorSpec((heads * config.qk_head_dim, q_rank), Cut.ROWS),
    )
    yield "self_attn.kv_a_proj_with_mqa.weight", TensorSpec((config.latent_dim, hidden))
    yield "self_attn.kv_a_layernorm.weight", TensorSpec((latent,))
    yield (
        "self_attn.kv_b_proj.weight",
        TensorSpec((heads * (config.qk_nope_head_dim + config.v_head_dim), latent), Cut.ROWS),
    )
    yield (
        "self_attn.o_proj.weight",
        TensorSpec((hidden, heads * config.v_head_dim), Cut.COLUMNS),
    )
    if config.is_full(layer):
        index_heads, index_dim = config.index_n_heads, config.index_head_dim
        yield "self_attn.indexer.wq_b.weight", TensorSpec((index_heads * index_dim, q_rank))
        yield "self_attn.indexer.wk.weight", TensorSpec((index_dim, hidden))
        yield "self_attn.indexer.weights_proj.weight", TensorSpec((index_heads, hidden))
        yield "self_attn.indexer.k_norm.weight", TensorSpec((index_dim,))
        yield "self_attn.indexer.k_norm.bias", TensorSpec((index_dim,))
    if config.is_moe(layer):
        count = config.n_routed_experts
        yield "mlp.gate.weight", TensorSpec((count, hidden), wide=True)
        yield "mlp.gate.e_score_correction_bias", TensorSpec((count,), wide=True)
        yield from _ffn("mlp.shared_experts.", hidden, config.shared_intermediate_size)
        for expert in range(count):
            yield from _ffn(f"mlp.experts.{expert}.", hidden, config.moe_intermediate_size, expert)
    else:
        yield from _ffn("mlp.", hidden, config.intermediate_size)
    if layer >= config.num_hidden_layers:
        yield "enorm.weight", TensorSpec((hidden,))
        yield "hnorm.weight", TensorSpec((hidden,))
        yield "eh_proj.weight", TensorSpec((hidden, 2 * hidden), Cut.COLUMNS)
        yield "shared_head.norm.weight", TensorSpec((hidden,))


def _ffn(
    prefix: str, hidden: int, inner: int, expert: int | None = None
) -> Iterator[tuple[str, TensorSpec]]:
    yield f"{prefix}gate_proj.weight", TensorSpec((inner, hidden), Cut.ROWS, expert)
    yield f"{prefix}up_proj.weight", TensorSpec((inner, hidden), Cut.ROWS, expert)
    yield f"{prefix}down_proj.weight", TensorSpec((hidden, inner), Cut.COLUMNS, expert)


def local_slice(
    spec: TensorSpec, config: ModelConfig, rank: int, size: int, layout: ExpertLayout
) -> tuple[slice, ...] | None:
    """The part of the tensor that `rank` of `size` holds, one slice a dimension, or None."""
    placed = spec.expert if layout == "ep" else None
    if placed is not None and placed // (config.n_routed_experts // size) != rank:
        return None  # most tensors of a large model
    whole = tuple(slice(0, n) for n in spec.shape)
    if placed is not None or spec.cut is Cut.WHOLE:
        return whole
    dim = 0 if spec.cut is Cut.ROWS else 1
    share = spec.shape[dim] // size
    return (*whole[:dim], slice(rank * share, (rank + 1) * share), *whole[dim + 1 :])
