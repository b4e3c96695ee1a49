# SPDX-License-Identifier: Apache-2.0
"""A whole routed layer of GLM-5.2 as one of eight ranks runs it, between two boundaries, at 8K.

The model's own `DecoderLayer` in block-fp8 with an fp8 cache; nothing is exchanged (a group of one
rank), so it is a rank's work without its collectives. Several layers take turns, each with weights
of its own but for the routed experts, of which each layer's router chooses others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from bench.operators.experts import Weights, make_weight
from bench.operators.sparse_mla import make_cache
from bench.registry import Case, Problem, memory_us
from glmserve.checkpoint.declared import declared_weights, open_source
from glmserve.checkpoint.placement import held_weights
from glmserve.checkpoint.weights import LayerWeights, MoeWeights, _tensors, allocate
from glmserve.kernels.quant import INDEX_ROW_BYTES
from glmserve.kernels.quantise import quantise
from glmserve.kernels.residual_norm import Normed
from glmserve.model.batch import StepBatch
from glmserve.model.caches import LayerCache
from glmserve.model.layer import DecoderLayer
from glmserve.model.step import Selection, Step
from glmserve.model.taps import Taps
from glmserve.parallel.group import SingleGroup

CONTEXT, PAGE, LOCAL = 8192, 64, 32
# rows: (requests, local experts hit, us of a layer with a shared index, input sets)
STEPS = {1: (1, 1, 52.0, 6), 6: (1, 6, 125.0, 6), 32: (32, 20, 255.0, 2), 192: (32, 32, 425.0, 2)}
INDEXED = 20.0  # us more where the layer scores for itself
CONFIG = open_source("glm-5.2-fp8").config
# One layer with one expert a rank and a small vocabulary: what `allocate` is asked for.
_LIGHT = replace(
    CONFIG,
    num_hidden_layers=1,
    n_routed_experts=8,
    vocab_size=1024,
    num_nextn_predict_layers=0,
    indexer_types=("full",),
    mlp_layer_types=("sparse",),
)


def launches(device: torch.device) -> Iterator[tuple[str, Callable[[], object]]]:
    yield from ()  # each operator lists its own


def make_layer(indexed: bool) -> LayerWeights:
    """Random weights of one layer but for the routed experts."""
    stored = declared_weights(_LIGHT, {"quant_method": "fp8"})
    held = held_weights(_LIGHT, stored, 0, 8, "ep", keep=True)
    weights, _ = allocate(_LIGHT, held, torch.bfloat16, "cuda")
    (layer,) = weights.layers
    for tensor in _tensors(layer):
        if tensor.dtype == torch.float8_e4m3fn:
            drawn = torch.randn(tensor.shape, device="cuda", dtype=torch.bfloat16) * 60
            tensor.copy_(drawn.clamp(-448, 448).to(tensor.dtype))
        elif tensor.dim() == 1:
            tensor.fill_(1.0)
        elif tensor.dtype == torch.float32:  # scales of blocks
            depth = 128 * tensor.shape[-1]
            tensor.uniform_(0.5, 1.5).mul_(depth**-0.5 / 60)
        else:
            tensor.normal_(0, tensor.shape[-1] ** -0.5)
    if not indexed:
        layer = replace(layer, attention=replace(layer.attention, indexer=None))
    return layer


_experts: list[Weights] = []


def with_experts(layer: LayerWeights, hit: int) -> LayerWeights:
    """`layer` with a router that keeps to `hit` local experts and their share of the others."""
    if not _experts:
        width, inner = CONFIG.hidden_size, CONFIG.moe_intermediate_size
        _experts.append(
            Weights(
                make_weight("fp8", LOCAL, 2 * inner, width, "cuda"),
                make_weight("fp8", LOCAL, width, inner, "cuda"),
            )
        )
    assert isinstance(layer.ffn, MoeWeights)
    gate = torch.empty(256, CONFIG.hidden_size, dtype=torch.bfloat16, device="cuda")
    bias = torch.full((256,), 34.0, device="cuda")
    bias[hit:LOCAL] = bias[LOCAL + 7 * hit :] = 32.0  # a score is below 1: these are never chosen
    return replace(
        layer,
        ffn=replace(
            layer.ffn, gate=gate, bias=bias, gate_up=_experts[0].gate_up, down=_experts[0].down
        ),
    )


class Sets:
    """Layers, their inputs and caches; `run(i)` is one pass through layer i."""

    def __init__(self, rows: int, indexed: bool) -> None:
        torch.manual_seed(3)
        requests, hit, _, count = STEPS[rows]
        each, pages = rows // requests, CONTEXT // PAGE
        self.indexed = indexed
        slots = requests * CONTEXT
        latent = make_cache(slots, fp8=True)
        index_k = None
        if indexed:
            index_k = torch.randint(0, 120, (slots, INDEX_ROW_BYTES), device="cuda").byte()
            scales = torch.empty(slots // PAGE, PAGE, device="cuda").fill_(0.25)
            index_k.view(slots // PAGE, -1)[:, -4 * PAGE :] = scales.view(torch.uint8)
        self.cache = LayerCache(latent, index_k)
        table = torch.randperm(slots // PAGE, device="cuda").int().view(requests, pages)
        positions = torch.arange(CONTEXT - each, CONTEXT, device="cuda").repeat(requests)
        lines = torch.arange(requests, device="cuda").repeat_interleave(each)
        tokens = torch.zeros(rows, dtype=torch.int64, device="cuda")
        batch = StepBatch(
            tokens, positions, lines, table, PAGE, max_context=CONTEXT, rows_per_sequence=each
        )
        self.step = Step.of(batch, CONFIG, torch.bfloat16, 0)
        seen = torch.stack([torch.randperm(CONTEXT - each, device="cuda") for _ in range(rows)])
        chosen = seen[:, : CONFIG.index_topk].sort(1).values.int().contiguous()
        self.selection = Selection(chosen, batch.slots(chosen))
        x = torch.randn(rows, CONFIG.hidden_size, device="cuda")
        x[:, 11] *= 50
        x = x.bfloat16()
        self.normed = Normed(x, quantise(x))
        self.residual = torch.randn(rows, CONFIG.hidden_size, device="cuda").bfloat16()
        self.layers = [self._layer(hit) for _ in range(count)]

    def _layer(self, hit: int) -> DecoderLayer:
        """A layer whose router, fed with what the attention gives it, hits so many experts here."""
        weights = with_experts(make_layer(self.indexed), hit)
        layer = DecoderLayer(CONFIG, weights, SingleGroup(), CONFIG.rms_norm_eps)
        assert isinstance(weights.ffn, MoeWeights)
        for _ in range(500):
            weights.ffn.gate.normal_(0, CONFIG.hidden_size**-0.5)
            if hit_by(layer, self) == hit:
                return layer
        raise AssertionError(f"no router of 500 hits {hit} experts")

    def forward(
        self, layer: DecoderLayer, rows: slice = slice(None), taps: Taps | None = None
    ) -> tuple[Normed, torch.Tensor]:
        step, normed, selection = self.step, self.normed, self.selection
        if rows != slice(None):
            b = step.batch
            one = StepBatch(
                b.tokens[rows].clone(), b.positions[rows].clone(), b.row_seq[rows].clone(),
                b.page_table, PAGE, max_context=CONTEXT, rows_per_sequence=1,
            )  # fmt: skip
            step = Step.of(one, CONFIG, torch.bfloat16, 0)
            normed = Normed(normed.rows[rows].clone(), quantise(normed.rows[rows].clone()))
            chosen = selection.positions[rows].clone()
            selection = Selection(chosen, one.slots(chosen))
        result, residual, _ = layer.forward(
            normed, self.residual[rows].clone() if rows != slice(None) else self.residual, step,
            self.cache, None if self.indexed else selection, layer.weights.input_norm, True,
            taps=taps,
        )  # fmt: skip
        return result, residual


def hit_by(layer: DecoderLayer, sets: Sets) -> int:
    taps = Taps()
    sets.forward(layer, taps=taps)
    ids = taps.routing[0].ids
    return len(ids[ids < LOCAL].unique())


def problem(rows: int, indexed: bool) -> Problem:
    sets = Sets(rows, indexed)
    outs: dict[int, tuple[Normed, torch.Tensor]] = {}
    with torch.inference_mode():
        first = sets.forward(sets.layers[0])[1].clone()

    def launch(i: int) -> None:
        outs[i] = sets.forward(sets.layers[i])

    def error() -> float:
        """Against the first eager pass: the layer is right if its operators are, which have
        references of their own; here it must repeat itself."""
        got = outs[0][1]
        return float((got.float() - first.float()).norm() / first.float().norm())

    def exact() -> bool:
        last = rows - 1
        normed, residual = sets.forward(sets.layers[0], slice(last, last + 1))
        batch = outs[0]
        return torch.equal(residual, batch[1][-1:]) and torch.equal(normed.rows, batch[0].rows[-1:])

    return Problem(launch, len(sets.layers), error, launches=len(sets.layers) * 2, exact=exact)


def floor_us(rows: int, indexed: bool) -> float:
    """Weights once, the latents of a request at most once."""
    requests, hit, _, _ = STEPS[rows]
    c = CONFIG
    d, heads = c.hidden_size, c.num_attention_heads // 8
    weights = (c.q_lora_rank + c.latent_dim) * d + heads * c.qk_head_dim * c.q_lora_rank
    weights += 2 * heads * (c.qk_nope_head_dim + c.v_head_dim) * c.kv_lora_rank
    weights += heads * c.v_head_dim * d + 2 * c.n_routed_experts * d
    weights += 3 * d * c.moe_intermediate_size // 8 + hit * 3 * d * c.moe_intermediate_size
    moved = weights + requests * min(CONTEXT, rows // requests * c.index_topk) * 656
    if indexed:
        width = c.index_n_heads * c.index_head_dim
        moved += width * c.q_lora_rank + 2 * (c.index_head_dim + c.index_n_heads) * d
        moved += requests * CONTEXT * INDEX_ROW_BYTES + 8 * rows * CONTEXT
    return memory_us(moved)


def cases() -> Iterator[Case]:
    for indexed in (False, True):
        for rows, (requests, hit, target, _) in STEPS.items():
            yield Case(
                "layer",
                f"{'full' if indexed else 'shared'} index, {rows} rows, {requests} requests, "
                f"{hit} experts hit",
                lambda rows=rows, indexed=indexed: problem(rows, indexed),
                floor_us(rows, indexed),
                0.0,
                None,
                target + (INDEXED if indexed else 0.0),
            )
