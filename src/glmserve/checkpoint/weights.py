# SPDX-License-Identifier: Apache-2.0
"""A rank's parameters in memory, grouped as the operators read them.

Projections that read the same input are one tensor (both A-projections, the indexer's two, gate
with up, all experts of a layer), so the checkpoint's tensors are views into larger ones:
`allocate` returns both the structure and that map of names to views. Not its job: files (`loader`),
which weights stay quantised (`placement`), arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass

import torch
from torch import Tensor

from glmserve.checkpoint.formats import BLOCK
from glmserve.checkpoint.placement import Form, Held
from glmserve.kernels.experts import ExpertWeight, Int4Weight
from glmserve.kernels.linear import QuantWeight
from glmserve.model_config import ModelConfig

Linear = Tensor | QuantWeight  # [out, in]


@dataclass(frozen=True)
class FfnWeights:
    """A SwiGLU block, this rank's columns: I = inner size / N."""

    gate_up: Linear  # [2 I, D], gate rows first
    down: Linear  # [D, I]


@dataclass(frozen=True)
class MoeWeights:
    """Routed experts: E / N whole ones ("ep") or all E with I / N columns each ("sliced")."""

    gate: Tensor  # [E, D], whole on every rank; fp32 or wider, or bf16 as stored
    bias: Tensor  # [E], fp32 or wider
    gate_up: ExpertWeight  # [experts, 2 I, D]
    down: ExpertWeight  # [experts, D, I], in the same form
    first: int  # id of the first expert held
    shared: FfnWeights


@dataclass(frozen=True)
class IndexerWeights:
    """The indexer, whole on every rank."""

    proj: Tensor  # [Di | Hi, D]: the key's rows, then the head weights'
    wq_b: Linear  # [Hi * Di, q_lora]
    k_norm_weight: Tensor  # [Di]
    k_norm_bias: Tensor  # [Di]


@dataclass(frozen=True)
class AttentionWeights:
    """H = heads / N of this rank; what is not per head is whole on every rank."""

    a_proj: Linear  # [q_lora | kv_lora | rope, D]
    q_norm: Tensor  # [q_lora]
    kv_norm: Tensor  # [kv_lora]
    q_b: Linear  # [H * (nope + rope), q_lora]
    kv_b: Tensor  # [H, nope + v, kv_lora]
    o_proj: Linear  # [D, H * v]
    indexer: IndexerWeights | None


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer's parameters on this rank; D is the hidden size."""

    input_norm: Tensor  # [D]
    post_norm: Tensor  # [D]
    attention: AttentionWeights
    ffn: FfnWeights | MoeWeights


@dataclass(frozen=True)
class MtpWeights:
    """The multi-token-prediction layer's parameters on this rank; embedding and head are shared."""

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


View = Tensor | QuantWeight | Int4Weight


def allocate(
    config: ModelConfig,
    held: Mapping[str, Held],
    dtype: torch.dtype,
    device: torch.device | str,
) -> tuple[ModelWeights, dict[str, View]]:
    """Uninitialised weights of a rank (`placement.held_weights` says what it holds), and for each
    of these names the views of its part: where its numbers, or its stored parts, go."""
    builder = _Builder(config, held, dtype, device)
    mtp = f"model.layers.{config.num_hidden_layers}.eh_proj.weight" in held
    weights = builder.model(with_mtp=mtp)
    assert builder.views.keys() == held.keys()
    return weights, builder.views


class _Builder:
    """Allocates in the structure's order and notes each checkpoint name's views."""

    def __init__(
        self,
        config: ModelConfig,
        held: Mapping[str, Held],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.config, self.held, self.device, self.dtype = config, held, device, dtype
        self.views: dict[str, View] = {}

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def plain(self, *names: str) -> Tensor:
        """One tensor whose rows are those of the named weights, in this order."""
        shapes = [self.held[name].shape for name in names]
        dtype = self.dtype
        if self.held[names[0]].form is Form.WIDE:
            dtype = torch.promote_types(dtype, torch.float32)
        rows = [shape[0] for shape in shapes]
        whole = self.empty((sum(rows), *shapes[0][1:]), dtype)
        self.views.update(zip(names, whole.split(rows), strict=True))
        return whole

    def linear(self, *names: str) -> Linear:
        """The stacked weights, in block-fp8 when they are kept so."""
        if self.held[names[0]].form is not Form.BLOCK_FP8:
            return self.plain(*names)
        rows = [self.held[name].shape[0] for name in names]
        values, scales = self._block_fp8(names, rows, self.held[names[0]].shape[1], 1)
        return QuantWeight(values[0], scales[0])

    def experts(self, experts: list[str], parts: tuple[str, ...]) -> ExpertWeight:
        """All experts of a layer, [E, rows of the parts, in]."""
        names = [f"{expert}{part}_proj.weight" for expert in experts for part in parts]
        form, (height, columns) = self.held[names[0]].form, self.held[names[0]].shape
        count, rows = len(experts), [height] * len(parts)
        if form is Form.PLAIN:
            return self.plain(*names).view(count, -1, columns)
        if form is Form.BLOCK_FP8:
            return self._block_fp8(names, rows, columns, count)
        return self._int4(names, rows, columns, count)

    def _block_fp8(
        self, names: tuple[str, ...] | list[str], rows: list[int], columns: int, count: int
    ) -> QuantWeight:
        blocks = [-(-r // BLOCK) for r in rows]
        values = self.empty((count, sum(rows), columns), torch.float8_e4m3fn)
        scales = self.empty((count, sum(blocks), columns // BLOCK), torch.float32)
        pieces = [
            QuantWeight(v, s)
            for i in range(count)
            for v, s in zip(values[i].split(rows), scales[i].split(blocks), strict=True)
        ]
        self.views.update(zip(names, pieces, strict=True))
        return QuantWeight(values, scales)

    def _int4(self, names: list[str], rows: list[int], columns: int, count: int) -> Int4Weight:
        stored = self.held[names[0]].stored
        groups, height = columns // stored.group, sum(rows)
        half = torch.float16 if stored.parts["scales"].dtype == "F16" else torch.bfloat16
        packed = self.empty((count, height, columns // 8), torch.int32)
        scales = self.empty((count, height, groups), half)
        zeros = None
        if "zeros" in stored.parts:
            zeros = self.empty((count, height // 8, groups), torch.int32)
        for i, name in enumerate(names):
            expert, step = i // len(rows), rows[0]
            top = i % len(rows) * step
            self.views[name] = Int4Weight(
                packed[expert, top : top + step],
                scales[expert, top : top + step],
                None if zeros is None else zeros[expert, top // 8 : (top + step) // 8],
            )
        return Int4Weight(packed, scales, zeros)

    def model(self, with_mtp: bool) -> ModelWeights:
        layers = self.config.num_hidden_layers
        return ModelWeights(
            embedding=self.plain("model.embed_tokens.weight"),
            layers=tuple(self.layer(i) for i in range(layers)),
            norm=self.plain("model.norm.weight"),
            head=self.plain("lm_head.weight"),
            mtp=self.mtp(layers) if with_mtp else None,
        )

    def mtp(self, layer: int) -> MtpWeights:
        prefix = f"model.layers.{layer}."
        return MtpWeights(
            embedding_norm=self.plain(prefix + "enorm.weight"),
            hidden_norm=self.plain(prefix + "hnorm.weight"),
            eh_proj=self.plain(prefix + "eh_proj.weight"),
            layer=self.layer(layer),
            norm=self.plain(prefix + "shared_head.norm.weight"),
        )

    def layer(self, layer: int) -> LayerWeights:
        prefix = f"model.layers.{layer}."
        moe = self.config.is_moe(layer)
        return LayerWeights(
            input_norm=self.plain(prefix + "input_layernorm.weight"),
            post_norm=self.plain(prefix + "post_attention_layernorm.weight"),
            attention=self.attention(prefix + "self_attn.", self.config.is_full(layer)),
            ffn=self.moe(prefix + "mlp.") if moe else self.ffn(prefix + "mlp."),
        )

    def attention(self, prefix: str, full: bool) -> AttentionWeights:
        c = self.config
        kv_b = self.plain(prefix + "kv_b_proj.weight")
        return AttentionWeights(
            a_proj=self.linear(prefix + "q_a_proj.weight", prefix + "kv_a_proj_with_mqa.weight"),
            q_norm=self.plain(prefix + "q_a_layernorm.weight"),
            kv_norm=self.plain(prefix + "kv_a_layernorm.weight"),
            q_b=self.linear(prefix + "q_b_proj.weight"),
            kv_b=kv_b.view(-1, c.qk_nope_head_dim + c.v_head_dim, c.kv_lora_rank),
            o_proj=self.linear(prefix + "o_proj.weight"),
            indexer=self.indexer(prefix + "indexer.") if full else None,
        )

    def indexer(self, prefix: str) -> IndexerWeights:
        return IndexerWeights(
            proj=self.plain(prefix + "wk.weight", prefix + "weights_proj.weight"),
            wq_b=self.linear(prefix + "wq_b.weight"),
            k_norm_weight=self.plain(prefix + "k_norm.weight"),
            k_norm_bias=self.plain(prefix + "k_norm.bias"),
        )

    def ffn(self, prefix: str) -> FfnWeights:
        return FfnWeights(
            gate_up=self.linear(prefix + "gate_proj.weight", prefix + "up_proj.weight"),
            down=self.linear(prefix + "down_proj.weight"),
        )

    def moe(self, prefix: str) -> MoeWeights:
        numbers = [
            e
            for e in range(self.config.n_routed_experts)
            if f"{prefix}experts.{e}.down_proj.weight" in self.held
        ]
        experts = [f"{prefix}experts.{e}." for e in numbers]
        return MoeWeights(
            gate=self.plain(prefix + "gate.weight"),
            bias=self.plain(prefix + "gate.e_score_correction_bias"),
            gate_up=self.experts(experts, ("gate", "up")),
            down=self.experts(experts, ("down",)),
            first=numbers[0],
            shared=self.ffn(prefix + "shared_experts."),
        )
