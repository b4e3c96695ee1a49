# SPDX-License-Identifier: Apache-2.0
"""What a rank's GPU memory is used for, before anything is loaded, and what the rest can hold.

Weights and cache rows are exact, from shapes; workspace, graphs and libraries are estimates, marked
so, with what they are made of. Knows neither torch nor CUDA: the engine process plans with it.
1 GB = 10^9 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from glmserve.cache_format import CacheFormat, choose_format, row_bytes
from glmserve.checkpoint.declared import Source
from glmserve.checkpoint.placement import Held, held_weights
from glmserve.config import MOST_SCORES, PAGE_SIZE, EngineConfig
from glmserve.errors import ConfigError
from glmserve.model_config import ModelConfig

H200_GB = 149.0  # that a process can use
_LIBRARIES = 2.0e9  # CUDA context, NCCL's buffers, compiled kernels
_GRAPHS = 0.5e9  # instantiated graphs of all buckets
_PARTIALS = 17e6  # partial sums and tickets of the products
_DRAWN_BYTES = 3 * 2048 * 8 + 64  # the sampler's histograms and search, a row that is drawn from
_SHAPED_BYTES = 256 * 32 * 4 + 256  # bad words, last tokens and settings, a device row
_SPARE = 0.02  # of the memory: the allocator's rounding
CONTEXTS = (8192, 32768, 102400, 1 << 20)


@dataclass(frozen=True)
class Item:
    """One use of a rank's memory; `exact` where it follows from shapes alone."""

    name: str
    bytes: float
    exact: bool = True


@dataclass(frozen=True)
class MemoryPlan:
    """One rank's memory; all ranks are alike."""

    memory: float  # bytes that the rank may use
    kv: CacheFormat
    items: tuple[Item, ...]  # all that is there without a single page
    token_bytes: int  # of the caches, all layers
    page_bytes: int  # of PAGE_SIZE tokens, and of the hidden state that drafting keeps with a page
    pages: int  # that fit; below 2 means that nothing can run
    max_model_len: int
    lookahead: int

    @property
    def used(self) -> float:
        return sum(item.bytes for item in self.items)

    def at_once(self, context: int) -> int:
        """Requests of this many tokens that the pages hold together; 0: not even one."""
        return max(self.pages - 1, 0) // -(-(context + self.lookahead) // PAGE_SIZE)

    def table(self) -> list[tuple[str, str]]:
        """(what, GB) lines, then what the rest holds."""
        lines = [
            (item.name + ("" if item.exact else " (estimate)"), f"{item.bytes / 1e9:.3f}")
            for item in self.items
        ]
        rest = self.memory - self.used
        lines += [
            ("sum without caches", f"{self.used / 1e9:.3f}"),
            ("memory", f"{self.memory / 1e9:.3f}"),
            (f"left for caches ({self.kv}, {self.token_bytes:,} B a token)", f"{rest / 1e9:.3f}"),
            (f"pages of {PAGE_SIZE} tokens", f"{max(self.pages, 0):,}"),
            ("longest prompt + output", f"{self.max_model_len:,}"),
        ]
        lines += [
            (f"requests at once of {context:,} tokens", f"{self.at_once(context):,}")
            for context in CONTEXTS
        ]
        return lines

    def check(self, wanted_pages: int = 0) -> None:
        """Raises ConfigError with the numbers when this cannot run, or not with these pages."""
        gb = f"{self.used / 1e9:.2f} GB without caches, {self.memory / 1e9:.2f} GB of memory"
        if self.pages < 2:
            parts = ", ".join(f"{item.name} {item.bytes / 1e9:.2f}" for item in self.items)
            raise ConfigError("memory", f"{self.memory / 1e9:.2f} GB", f"is too little: {parts}")
        if wanted_pages > self.pages:
            raise ConfigError(
                "num_pages",
                wanted_pages,
                f"need {wanted_pages * self.page_bytes / 1e9:.2f} GB a rank, "
                f"{self.pages} fit: {gb}",
            )
        if self.at_once(self.max_model_len) < 1:
            raise ConfigError(
                "max_model_len", self.max_model_len, f"needs more than the {self.pages} pages: {gb}"
            )


def memory_plan(source: Source, engine: EngineConfig, memory: float) -> MemoryPlan:
    """The plan of one rank with `memory` bytes; engine.num_pages is not looked at, an
    engine.max_model_len of 0 becomes the longest that fits."""
    c = source.config
    item = {"bf16": 2, "fp32": 4, "fp64": 8}[engine.dtype]
    keep = engine.device == "cuda" and engine.dtype == "bf16"
    mtp = engine.drafts > 0 and c.num_mtp_layers > 0
    held = held_weights(c, source.weights, 0, engine.ranks, engine.expert_layout, keep, mtp)
    kv = choose_format(engine, c)
    latent, index = row_bytes(c, kv, item)
    extra = 1 if c.num_mtp_layers else 0  # the caches of the MTP layer are always there
    tokens = latent * (c.num_hidden_layers + extra) + index * (len(c.full_layers) + extra)
    decode = engine.max_rows * (engine.drafts + 1)
    rows = engine.chunk + decode
    items = [Item(name, size) for name, size in weight_groups(c, held, item).items()]
    items += [
        Item("activations", _activations(c, engine, rows, decode, item) + _PARTIALS, False),
        Item("sampler", _sampler(c, engine) if engine.device == "cuda" else 0.0, False),
        Item("CUDA graphs", _GRAPHS if engine.graphs and engine.device == "cuda" else 0.0, False),
        Item("CUDA, NCCL, kernels", _LIBRARIES if engine.device == "cuda" else 0.0, False),
        Item("spare", _SPARE * memory, False),
    ]
    limit = engine.max_model_len or c.max_position_embeddings
    scores = 4.0 * min(rows * limit, MOST_SCORES)
    items.insert(-3, Item("index scores", scores, False))
    page = tokens * PAGE_SIZE + (item * c.hidden_size if mtp else 0)
    pages = int((memory - sum(i.bytes for i in items)) // page)
    room = (pages - 1) * PAGE_SIZE - engine.lookahead
    length = engine.max_model_len or max(0, min(limit, room))
    return MemoryPlan(memory, kv, tuple(items), tokens, page, pages, length, engine.lookahead)


def _sampler(c: ModelConfig, engine: EngineConfig) -> float:
    """Tables of what requests ask for, a line a device row, and scratch."""
    width = c.vocab_size / engine.ranks
    drawn = max(engine.max_rows * (engine.drafts + 2), 512)
    return (engine.max_rows + 1) * (8.25 * width + _SHAPED_BYTES) + drawn * _DRAWN_BYTES


def with_planned_pages(engine: EngineConfig, source: Source, memory: float) -> EngineConfig:
    """Settings whose `num_pages` is set: those asked for if they fit, else as many as fit. Raises
    ConfigError with the numbers."""
    plan = memory_plan(source, engine, memory)
    plan.check(engine.num_pages)
    return replace(engine, num_pages=engine.num_pages or plan.pages)


def weight_groups(config: ModelConfig, held: Mapping[str, Held], item: int) -> dict[str, float]:
    """Bytes in memory by what they are for."""
    mtp = f"model.layers.{config.num_hidden_layers}."
    groups = dict.fromkeys(
        ("attention", "indexers", "routed experts", "shared and dense FFN", "routers",
         "embedding and head", "norms", "MTP layer"), 0.0,
    )  # fmt: skip
    for name, weight in held.items():
        groups[_group(name, mtp)] += weight.memory_bytes(item)
    return {f"weights: {name}": size for name, size in groups.items() if size}


def _group(name: str, mtp: str) -> str:
    if name.startswith(mtp):
        return "MTP layer"
    for part, group in (
        (".indexer.", "indexers"),
        ("norm", "norms"),
        (".self_attn.", "attention"),
        (".mlp.experts.", "routed experts"),
        (".mlp.gate.", "routers"),
        (".mlp.", "shared and dense FFN"),
    ):
        if part in name:
            return group
    return "embedding and head"


def _activations(c: ModelConfig, engine: EngineConfig, rows: int, drawn: int, item: int) -> float:
    """Tensors of one layer that live together, and the logits of the rows that draw a token."""
    heads = c.num_attention_heads // engine.ranks
    head = c.qk_head_dim + c.latent_dim + c.kv_lora_rank + c.v_head_dim
    attention = heads * head + c.index_n_heads * c.index_head_dim
    inner = c.moe_intermediate_size
    if engine.expert_layout == "sliced":
        inner //= engine.ranks
    # With whole experts all of a row's pairs may be this rank's.
    experts = c.num_experts_per_tok * (3 * inner + c.hidden_size)
    layer = rows * item * (8 * c.hidden_size + max(attention, experts))
    return layer + 3 * 4 * drawn * c.vocab_size // engine.ranks
