# SPDX-License-Identifier: Apache-2.0
"""One decode step of one rank as a table: bytes, flops and link traffic by operator, and floors.

Every figure is a product of shapes, weights as `placement` keeps them. Experts are hit as by
uniform independent routing. Counted as read once: weights, distinct cache rows (the rows of one
request share what they select, the low figure; the high one has disjoint selections). Not counted:
activations and index scores, which pass between operators mostly through L2, and launches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from glmserve.cache_format import CacheFormat, row_bytes
from glmserve.checkpoint.declared import Source
from glmserve.checkpoint.placement import Form, Held, held_weights
from glmserve.errors import ConfigError
from glmserve.model_config import ExpertLayout, ModelConfig

MEMORY_RATE = 4.3e12  # bytes/s, copy measured on an H200
GATHER_RATE = 5.5e12  # bytes/s of selected cache rows that lie in L2, assumed
FLOPS = {Form.BLOCK_FP8: 1580e12}  # others: bf16
FLOPS_BF16 = 790e12
LINK_RATE = 373e9  # bytes/s a direction, peer copy measured between two H200s
_BF16 = 2


@dataclass(frozen=True)
class Operator:
    """One operator of a step, summed over the layers that have it."""

    name: str
    bytes: float  # of HBM, the low figure
    flops: float
    rate: float = FLOPS_BF16  # flops/s that its arithmetic can reach
    high: float | None = None  # bytes when rows of a request share nothing

    @property
    def floor(self) -> float:
        """Seconds: its bytes or its arithmetic, whichever takes longer."""
        return max(self.bytes / MEMORY_RATE, self.flops / self.rate)


@dataclass(frozen=True)
class Collective:
    """All exchanges of one kind in a step: `count` of `payload` bytes each, sums over N ranks."""

    name: str
    count: int
    payload: float
    ranks: int

    @property
    def one_shot(self) -> float:
        """Bytes that a rank receives when each reads all others' whole rows."""
        return self.count * self.payload * (self.ranks - 1)

    @property
    def two_shot(self) -> float:
        """Bytes when each reduces its share and gathers the others'."""
        return 2 * self.count * self.payload * (self.ranks - 1) / self.ranks

    @property
    def floor(self) -> float:
        return min(self.one_shot, self.two_shot) / LINK_RATE


@dataclass(frozen=True)
class Ledger:
    """A step of one rank."""

    operators: tuple[Operator, ...]  # of the target model
    drafting: tuple[Operator, ...]  # of all draft passes
    collectives: tuple[Collective, ...]
    experts_hit: float  # distinct local experts of a layer, mean of the ranks
    experts_hit_busiest: float

    @property
    def bytes(self) -> float:
        return sum(o.bytes for o in (*self.operators, *self.drafting))

    @property
    def floor(self) -> float:
        """Seconds of memory traffic alone, as if all of it ran at the full rate."""
        return self.bytes / MEMORY_RATE

    @property
    def operator_floor(self) -> float:
        """Seconds when operators follow each other: the sum of each one's floor."""
        return sum(o.floor for o in (*self.operators, *self.drafting))

    def find(self, name: str) -> Operator:
        return next(o for o in (*self.operators, *self.drafting) if o.name == name)


@dataclass(frozen=True)
class _Kind:
    """Weights read together: bytes of all layers and multiplications a row."""

    bytes: float
    products: float
    rate: float


def ledger(
    source: Source,
    ranks: int,
    rows: int,
    context: int,
    drafts: int,
    layout: ExpertLayout = "ep",
    kv: CacheFormat = "fp8",
    eh_proj_replicated: bool = False,
) -> Ledger:
    """The step of `rows` target rows: rows / (drafts + 1) requests of `context` tokens each, then
    `drafts` draft passes, the first over all rows, the others over one row a request.

    eh_proj_replicated: as some engines hold it; here every rank has its columns. Raises ConfigError
    when the rows are not whole requests.
    """
    c = source.config
    c.check_ranks(ranks, layout)
    for key, value, low in (("rows", rows, 1), ("context", context, 1), ("drafts", drafts, 0)):
        if value < low:
            raise ConfigError(key, value, f"must be at least {low}")
    if rows % (drafts + 1):
        raise ConfigError("rows", rows, f"a request with {drafts} drafts has {drafts + 1} rows")
    if drafts and not c.num_mtp_layers:
        raise ConfigError("drafts", drafts, "the model has no MTP layer")
    requests = rows // (drafts + 1)
    held = held_weights(c, source.weights, 0, ranks, layout, keep=True)
    mtp = f"model.layers.{c.num_hidden_layers}."
    target = {name: w for name, w in held.items() if not name.startswith(mtp)}
    layers = (c.num_hidden_layers, len(c.full_layers))
    step = _Step(c, ranks, layout, kv, context)
    operators = step.layers(target, rows, requests, layers, scored=True)
    operators.append(step.head(held, rows))
    drafting: list[Operator] = []
    if drafts:
        own = {name: w for name, w in held.items() if name.startswith(mtp)}
        eh = step.kind(own, "eh_proj")
        share = ranks if eh_proj_replicated else 1
        for number in range(drafts):
            count = rows if number == 0 else requests
            part = step.layers(own, count, requests, (1, 1), scored=number == 0)
            part.append(
                Operator("eh_proj", eh.bytes * share, 2 * count * eh.products * share, eh.rate)
            )
            part.append(step.head(held, count))
            drafting = _add(drafting, part)
        drafting = [Operator(f"draft {o.name}", o.bytes, o.flops, o.rate, o.high) for o in drafting]
    return Ledger(
        tuple(operators),
        tuple(drafting),
        _collectives(c, ranks, rows, requests, drafts),
        experts_hit(c, ranks, layout, rows),
        experts_hit_busiest(c, ranks, layout, rows),
    )


def prefill_floor(
    source: Source, ranks: int, tokens: int, layout: ExpertLayout = "ep", kv: CacheFormat = "fp8"
) -> float:
    """Seconds of a prompt of `tokens` tokens through the target model in one pass, operator by
    operator. Each token scores and selects among those before it; ranks score a share of them
    each. Selections are read token by token, through L2. Neither links nor the MTP layer count."""
    c = source.config
    c.check_ranks(ranks, layout)
    held = held_weights(c, source.weights, 0, ranks, layout, keep=True)
    mtp = f"model.layers.{c.num_hidden_layers}."
    target = {name: w for name, w in held.items() if not name.startswith(mtp)}
    step = _Step(c, ranks, layout, kv, tokens)
    layers = (c.num_hidden_layers, len(c.full_layers))
    total = step.head(held, 1).floor
    few = min(tokens, c.index_topk)
    selected = few * (few + 1) / 2 + (tokens - few) * few  # of all tokens, a layer
    for o in step.layers(target, tokens, 1, layers, scored=True):
        if o.name == "index keys":
            o = replace(o, flops=o.flops / (2 * ranks))
        elif o.name == "sparse attention":
            gathered = selected * step.latent * c.num_hidden_layers / GATHER_RATE
            flops = o.flops * selected / (tokens * few)
            total += max(gathered, flops / o.rate)
            continue
        total += o.floor
    return total


class _Step:
    def __init__(
        self, config: ModelConfig, ranks: int, layout: ExpertLayout, kv: CacheFormat, context: int
    ) -> None:
        self.config, self.ranks, self.layout, self.context = config, ranks, layout, context
        self.latent, self.index = row_bytes(config, kv, _BF16)

    def kind(self, held: Mapping[str, Held], *parts: str, but: str = " ") -> _Kind:
        """The weights whose names contain one of the parts."""
        chosen = {
            name: w
            for name, w in held.items()
            if any(part in name for part in parts) and but not in name
        }
        forms = {w.form for name, w in chosen.items() if len(w.shape) == 2}
        rate = FLOPS[Form.BLOCK_FP8] if forms == {Form.BLOCK_FP8} else FLOPS_BF16
        size = sum(w.memory_bytes(_BF16) for w in chosen.values())
        products = sum(w.shape[0] * w.shape[1] for w in chosen.values() if len(w.shape) == 2)
        return _Kind(size, products, rate)

    def head(self, held: Mapping[str, Held], rows: int) -> Operator:
        kind = self.kind(held, "lm_head")
        return Operator("lm_head", kind.bytes, 2 * rows * kind.products, kind.rate)

    def layers(
        self,
        held: Mapping[str, Held],
        rows: int,
        requests: int,
        layers: tuple[int, int],
        scored: bool,
    ) -> list[Operator]:
        """All operators of (layers, full layers) once over `rows` rows of `requests`."""
        c, context = self.config, self.context
        kinds = {
            "a_proj": self.kind(held, "q_a_proj", "kv_a_proj"),
            "q_b": self.kind(held, "q_b_proj"),
            "absorbed kv_b": self.kind(held, "kv_b_proj"),
            "o_proj": self.kind(held, "o_proj.weight"),
            "router": self.kind(held, ".mlp.gate."),
            "shared expert": self.kind(held, ".shared_experts."),
            "dense FFN": self.kind(held, ".mlp.gate_proj", ".mlp.up_proj", ".mlp.down_proj"),
            "norms": self.kind(held, "norm", but=".indexer."),
        }
        if scored:
            kinds["indexer projections"] = self.kind(held, ".indexer.")
        found = [
            Operator(name, kind.bytes, 2 * rows * kind.products, kind.rate)
            for name, kind in kinds.items()
            if kind.bytes
        ]
        every, full = layers
        if scored:
            width = c.index_n_heads * c.index_head_dim
            size = float(requests * context * self.index * full)
            flops = 2.0 * rows * context * width * full
            found.append(Operator("index keys", size, flops, FLOPS[Form.BLOCK_FP8]))
        chosen = min(c.index_topk, context)
        disjoint = min(rows // requests * c.index_topk, context)
        heads = c.num_attention_heads // self.ranks
        flops = 2.0 * rows * heads * chosen * (c.latent_dim + c.kv_lora_rank) * every
        found.append(
            Operator(
                "sparse attention",
                float(requests * chosen * self.latent * every),
                flops,
                high=float(requests * disjoint * self.latent * every),
            )
        )
        experts = self.kind(held, ".mlp.experts.")
        if experts.bytes:
            local = c.n_routed_experts // (self.ranks if self.layout == "ep" else 1)
            hit = experts_hit(c, self.ranks, self.layout, rows)
            pairs = rows * c.num_experts_per_tok / (self.ranks if self.layout == "ep" else 1)
            flops = 2 * pairs * experts.products / local
            found.append(
                Operator("routed experts", experts.bytes / local * hit, flops, experts.rate)
            )
        return found


def _add(into: list[Operator], more: list[Operator]) -> list[Operator]:
    """Operators of the same name summed; the order is that of the first pass."""
    summed = {o.name: o for o in into}
    for o in more:
        old = summed.get(o.name)
        if old is None:
            summed[o.name] = o
            continue
        high = None if o.high is None else o.high + (old.high or 0.0)
        summed[o.name] = Operator(o.name, old.bytes + o.bytes, old.flops + o.flops, o.rate, high)
    return list(summed.values())


def experts_hit(config: ModelConfig, ranks: int, layout: ExpertLayout, rows: int) -> float:
    """Distinct experts of a layer that `rows` rows choose among those a rank holds (mean rank)."""
    local = config.n_routed_experts // (ranks if layout == "ep" else 1)
    missed = 1 - config.num_experts_per_tok / config.n_routed_experts
    return float(local * (1 - missed**rows))


def experts_hit_busiest(config: ModelConfig, ranks: int, layout: ExpertLayout, rows: int) -> float:
    """The same of the rank that is hit most, simulated with a fixed seed (within 1%)."""
    count, chosen = config.n_routed_experts, config.num_experts_per_tok
    if layout == "sliced" or ranks == 1:
        return experts_hit(config, ranks, layout, rows)
    if rows * chosen > 32 * count:  # every expert, as far as a float can tell
        return count / ranks
    generator = np.random.default_rng(0)
    trials = max(100, 8000 // rows)
    total = 0
    for _ in range(trials):
        picks = generator.random((rows, count)).argpartition(chosen, axis=1)[:, :chosen]
        hit = np.zeros(count, dtype=bool)
        hit[picks] = True
        total += int(hit.reshape(ranks, -1).sum(1).max())
    return total / trials


def _collectives(
    c: ModelConfig, ranks: int, rows: int, requests: int, drafts: int
) -> tuple[Collective, ...]:
    """Boundaries: the embedding's sum and two a layer. A draft pass has the embedding's, that after
    eh_proj and its layer's two."""
    row = c.hidden_size * _BF16
    found = [Collective("target boundaries", 2 * c.num_hidden_layers + 1, rows * row, ranks)]
    if drafts:
        found.append(Collective("first draft pass", 4, rows * row, ranks))
        count = 4 * (drafts - 1)
        found.append(Collective("later draft passes", count, requests * row, ranks))
    # A row's best of each shard, value and id; drafts exchange theirs pass by pass.
    found.append(Collective("draws", 1 + drafts, rows * 8, ranks))
    return tuple(found)
