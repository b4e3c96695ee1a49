# SPDX-License-Identifier: Apache-2.0
"""A rank's parameters in memory, grouped as the operators read them.

Projections that read the same input are one tensor (the A-projections with the indexer's two, gate
with up, all experts of a layer), so the checkpoint's tensors are views into larger ones:
`allocate` returns both the structure and that map of names to views. Not its job: files, shapes on
disk (`layout`), arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass

import torch
from torch import Tensor

from glmserve.checkpoint.layout import checkpoint_tensors, local_slice, stored_dtype
from glmserve.model_config import ExpertLayout, ModelConfig


@dataclass(frozen=True)
class FfnWeights:
    """A SwiGLU block, this rank's columns: I = inner size / N."""

    gate_up: Tensor  # [2 I, D], gate rows first
    down: Tensor  # [D, I]


@dataclass(frozen=True)
class MoeWeights:
    """Routed experts: E / N whole ones ("ep") or all E with I / N columns each ("sliced")."""

    gate: Tensor  # [E, D], fp32 or wider, whole on every rank
    bias: Tensor  # [E], fp32 or wider
    gate_up: Tensor  # [experts, 2 I, D]
    down: Tensor  # [experts, D, I]
    first: int  # id of the first expert held
    shared: FfnWeights


@dataclass(frozen=True)
class IndexerWeights:
    """The indexer beyond its two rows blocks of `AttentionWeights.a_proj`; whole on every rank."""

    wq_b: Tensor  # [Hi * Di, q_lora]
    k_norm_weight: Tensor  # [Di]
    k_norm_bias: Tensor  # [Di]


@dataclass(frozen=True)
class AttentionWeights:
    """H = heads / N of this rank; what is not per head is whole on every rank."""

    a_proj: Tensor  # [q_lora | kv_lora | rope (| Di | Hi with an indexer), D]
    q_norm: Tensor  # [q_lora]
    kv_norm: Tensor  # [kv_lora]
    q_b: Tensor  # [H * (nope + rope), q_lora]
    kv_b: Tensor  # [H, nope + v, kv_lora]
    o_proj: Tensor  # [D, H * v]
    indexer: IndexerWeights | None


@dataclass(frozen=True)
class LayerWeights:
    input_norm: Tensor  # [D]
    post_norm: Tensor  # [D]
    attention: AttentionWeights
    ffn: FfnWeights | MoeWeights


@dataclass(frozen=True)
class MtpWeights:
    embedding_norm: Tensor  # [D], enorm
    hidden_norm: Tensor  # [D], hnorm
    eh_proj: Tensor  # [D, 2 D / N], columns of this rank: embedding first
    layer: LayerWeights
    norm: Tensor  # [D], shared_head.norm


@dataclass(frozen=True)
class ModelWeights:
    """All parameters of one rank. `embedding` and `head` are rows [rank * V / N, ...)."""

    embedding: Tensor  # [V / N, D]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [D]
    head: Tensor  # [V / N, D]
    mtp: MtpWeights | None

    @property
    def parameter_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in _tensors(self))


def _tensors(node: object) -> Iterator[Tensor]:
    if isinstance(node, Tensor):
        yield node
    elif isinstance(node, tuple):
        for item in node:
            yield from _tensors(item)
    elif is_dataclass(node):
        for field in fields(node):
            yield from _tensors(getattr(node, field.name))


def allocate(
    config: ModelConfig,
    rank: int,
    size: int,
    layout: ExpertLayout,
    dtype: torch.dtype,
    device: torch.device | str,
    mtp: bool = True,
) -> tuple[ModelWeights, dict[str, Tensor]]:
    """Uninitialised weights of `rank`, and for each checkpoint tensor that it holds a part of the
    view to copy that part into."""
    builder = _Builder(config, rank, size, layout, dtype, device, mtp)
    weights = builder.model(mtp and config.num_mtp_layers > 0)
    assert builder.views.keys() == builder.local.keys()
    return weights, builder.views


class _Builder:
    """Allocates in the structure's order and notes each checkpoint name's view."""

    def __init__(
        self,
        config: ModelConfig,
        rank: int,
        size: int,
        layout: ExpertLayout,
        dtype: torch.dtype,
        device: torch.device | str,
        mtp: bool,
    ) -> None:
        self.config, self.device, self.dtype = config, device, dtype
        self.specs = checkpoint_tensors(config, mtp)
        self.local: dict[str, tuple[int, ...]] = {}  # shapes of this rank's parts
        for name, spec in self.specs.items():
            part = local_slice(spec, config, rank, size, layout)
            if part is not None:
                self.local[name] = tuple(s.stop - s.start for s in part)
        self.views: dict[str, Tensor] = {}

    def stack(self, *names: str) -> Tensor:
        """One tensor whose rows are those of the named tensors, in this order."""
        shapes = [self.local[name] for name in names]
        rows = [shape[0] for shape in shapes]
        dtype = stored_dtype(self.specs[names[0]], self.dtype)
        whole = torch.empty((sum(rows), *shapes[0][1:]), dtype=dtype, device=self.device)
        start = 0
        for name, count in zip(names, rows, strict=True):
            self.views[name] = whole[start : start + count]
            start += count
        return whole

    def model(self, with_mtp: bool) -> ModelWeights:
        layers = self.config.num_hidden_layers
        return ModelWeights(
            embedding=self.stack("model.embed_tokens.weight"),
            layers=tuple(self.layer(i) for i in range(layers)),
            norm=self.stack("model.norm.weight"),
            head=self.stack("lm_head.weight"),
            mtp=self.mtp(layers) if with_mtp else None,
        )

    def mtp(self, layer: int) -> MtpWeights:
        prefix = f"model.layers.{layer}."
        return MtpWeights(
            embedding_norm=self.stack(prefix + "enorm.weight"),
            hidden_norm=self.stack(prefix + "hnorm.weight"),
            eh_proj=self.stack(prefix + "eh_proj.weight"),
            layer=self.layer(layer),
            norm=self.stack(prefix + "shared_head.norm.weight"),
        )

    def layer(self, layer: int) -> LayerWeights:
        prefix = f"model.layers.{layer}."
        moe = self.config.is_moe(layer)
        return LayerWeights(
            input_norm=self.stack(prefix + "input_layernorm.weight"),
            post_norm=self.stack(prefix + "post_attention_layernorm.weight"),
            attention=self.attention(prefix + "self_attn.", self.config.is_full(layer)),
            ffn=self.moe(prefix + "mlp.") if moe else self.ffn(prefix + "mlp."),
        )

    def attention(self, prefix: str, full: bool) -> AttentionWeights:
        c = self.config
        a_names = ["q_a_proj", "kv_a_proj_with_mqa"]
        a_names += ["indexer.wk", "indexer.weights_proj"] if full else []
        kv_b = self.stack(prefix + "kv_b_proj.weight")
        return AttentionWeights(
            a_proj=self.stack(*(f"{prefix}{name}.weight" for name in a_names)),
            q_norm=self.stack(prefix + "q_a_layernorm.weight"),
            kv_norm=self.stack(prefix + "kv_a_layernorm.weight"),
            q_b=self.stack(prefix + "q_b_proj.weight"),
            kv_b=kv_b.view(-1, c.qk_nope_head_dim + c.v_head_dim, c.kv_lora_rank),
            o_proj=self.stack(prefix + "o_proj.weight"),
            indexer=self.indexer(prefix + "indexer.") if full else None,
        )

    def indexer(self, prefix: str) -> IndexerWeights:
        return IndexerWeights(
            wq_b=self.stack(prefix + "wq_b.weight"),
            k_norm_weight=self.stack(prefix + "k_norm.weight"),
            k_norm_bias=self.stack(prefix + "k_norm.bias"),
        )

    def ffn(self, prefix: str) -> FfnWeights:
        return FfnWeights(
            gate_up=self.stack(prefix + "gate_proj.weight", prefix + "up_proj.weight"),
            down=self.stack(prefix + "down_proj.weight"),
        )

    def moe(self, prefix: str) -> MoeWeights:
        held = [
            e
            for e in range(self.config.n_routed_experts)
            if f"{prefix}experts.{e}.down_proj.weight" in self.local
        ]
        base = [f"{prefix}experts.{e}." for e in held]
        gate_up = self.stack(*(f"{b}{part}_proj.weight" for b in base for part in ("gate", "up")))
        down = self.stack(*(f"{b}down_proj.weight" for b in base))
        return MoeWeights(
            gate=self.stack(prefix + "gate.weight"),
            bias=self.stack(prefix + "gate.e_score_correction_bias"),
            gate_up=gate_up.view(len(held), -1, gate_up.shape[1]),
            down=down.view(len(held), -1, down.shape[1]),
            first=held[0],
            shared=self.ffn(prefix + "shared_experts."),
        )
