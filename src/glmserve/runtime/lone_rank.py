# SPDX-License-Identifier: Apache-2.0
"""A rank without an engine, for measurements: its share of the weights, caches that look filled,
and step runners over them. Everything is what a server's rank has, except that its group may be one
of stand-ins (`parallel.stand_in`).

Requests are put at their context without running their prompts: latents and index keys are random.
Where the other ranks are not there, tokens are ids of this rank's part of the vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from glmserve.cache_format import choose_format
from glmserve.checkpoint.declared import Source, config_path
from glmserve.checkpoint.memory_plan import memory_plan
from glmserve.checkpoint.reader import open_share
from glmserve.checkpoint.synthetic_weights import synthetic_share
from glmserve.checkpoint.weights import ModelWeights
from glmserve.config import PAGE_SIZE, EngineConfig
from glmserve.kernels.quant import pack_latent_rows, write_index_rows
from glmserve.kernels.row_state import columns
from glmserve.messages import PageGrant, RowInit, StepMasks, StepPlan
from glmserve.model.caches import Caches, LayerCache
from glmserve.model.decoder import Decoder
from glmserve.model.mtp import Mtp
from glmserve.parallel.group import Group
from glmserve.parallel.stand_in import StandInGroup
from glmserve.runtime.packing import Layout, Places, Shape, pack
from glmserve.runtime.sampler import Sampler
from glmserve.runtime.step import StepRunner, most_drawn

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
_ENDLESS = 1 << 30  # tokens that a request may still draw
_FILLED_AT_ONCE = 1 << 16  # cache rows


@dataclass(frozen=True)
class LoneRank:
    """The parts that all measurements share."""

    source: Source
    config: (
        EngineConfig  # num_pages, chunk and layout as measured; the rest is replaced case by case
    )
    group: Group
    weights: ModelWeights
    caches: Caches
    sampler: Sampler
    decoder: Decoder
    mtp: Mtp | None

    def runner(self, requests: int, context: int, drafts: int, chunk: int) -> StepRunner:
        """A step runner with tables for `requests` of up to `context` tokens and what they add."""
        share = self.source.config.index_share_for_mtp_iteration
        config = dataclasses.replace(
            self.config,
            max_rows=requests,
            max_model_len=context + PAGE_SIZE,
            drafts=drafts,
            chunk=chunk,
            share_draft_index=share,
        )
        runner = StepRunner(
            config,
            self.decoder,
            self.mtp if drafts else None,
            self.caches,
            self.sampler,
            self.sampler.ids.device,
            _no_masks,
        )
        self.sampler.prepare(most_drawn(config))
        return runner

    @property
    def tokens(self) -> tuple[int, int]:
        """Ids that rows may have: from, up to."""
        if not isinstance(self.group, StandInGroup):
            return 0, self.source.config.vocab_size
        ids = self.sampler.ids
        return int(ids[0]), int(ids[-1]) + 1

    def fits(self, requests: int, context: int, drafts: int) -> bool:
        """Whether the requests have pages of their own; else they share some."""
        return requests * pages_of(context, drafts) < self.config.num_pages


def pages_of(context: int, drafts: int) -> int:
    """Pages of a request in these measurements."""
    lookahead = 2 * drafts + 1 if drafts else 0
    return -(-(context + PAGE_SIZE + lookahead) // PAGE_SIZE)


def open_rank(
    source: Source,
    config: EngineConfig,
    group: Group,
    wanted_pages: int,
    memory: float,
    progress: Callable[[str], None],
) -> LoneRank:
    """Loads or makes the weights, and caches of `wanted_pages`, or as many as `memory` bytes hold
    by the memory plan (0: all that is wanted)."""
    device = torch.device("cuda:0" if config.device == "cuda" else "cpu")
    dtype, model, size = _DTYPES[config.dtype], source.config, config.ranks
    assert group.size == size, (group.size, size)
    if memory:
        planned = memory_plan(source, dataclasses.replace(config, num_pages=0), memory)
        planned.check()
        wanted_pages = min(wanted_pages, planned.pages)
    config = dataclasses.replace(config, num_pages=wanted_pages)
    mtp = config.drafts > 0
    cut = (group.rank, size, config.expert_layout, dtype, device, mtp)
    if config.synthetic:
        weights = synthetic_share(config.checkpoint, *cut).load(progress)
    else:
        directory = config_path(config.checkpoint).parent
        weights = open_share(str(directory), model, *cut).load(progress)
    form = choose_format(config, model)
    caches = Caches.allocate(model, config.num_pages, PAGE_SIZE, dtype, device, form)
    fill(caches, model.kv_lora_rank, device)
    eps = config.latent_norm_eps
    return LoneRank(
        source,
        config,
        group,
        weights,
        caches,
        Sampler(group, model.vocab_size // size, model.vocab_size, device),
        Decoder(model, weights, group, latent_norm_eps=eps),
        Mtp(model, weights, group, latent_norm_eps=eps) if mtp else None,
    )


@torch.inference_mode()
def fill(caches: Caches, kv_lora_rank: int, device: torch.device) -> None:
    """Random latents of the length that a normed one has, random roped parts and index keys."""
    generator = torch.Generator(device).manual_seed(2)

    def draw(rows: int, width: int) -> Tensor:
        return torch.randn(rows, width, generator=generator, device=device)

    for layer in _layers(caches):
        slots = len(layer.latent)
        for start in range(0, slots, _FILLED_AT_ONCE):
            some = slice(start, min(start + _FILLED_AT_ONCE, slots))
            rows = some.stop - start
            latent = torch.nn.functional.rms_norm(draw(rows, kv_lora_rank), (kv_lora_rank,))
            quantised = layer.latent.dtype == torch.uint8
            rope = 64 if quantised else layer.latent.shape[1] - kv_lora_rank
            packed = pack_latent_rows if quantised else _join
            layer.latent[some] = packed(latent, draw(rows, rope))
            if layer.index_k is None:
                continue
            if quantised:
                where = torch.arange(some.start, some.stop, device=device)
                write_index_rows(layer.index_k, where, draw(rows, 128))
            else:
                layer.index_k[some] = draw(rows, layer.index_k.shape[1]).to(layer.index_k.dtype)


def _join(latent: Tensor, rope: Tensor) -> Tensor:
    return torch.cat((latent, rope), dim=1)


def _layers(caches: Caches) -> Iterator[LayerCache]:
    yield from caches.layers
    if caches.mtp is not None:
        yield caches.mtp


def _no_masks() -> StepMasks:
    raise AssertionError("no request has a grammar")


class Requests:
    """The decoding rows of a runner, all of them at the same context, and the step they make."""

    def __init__(self, rank: LoneRank, runner: StepRunner, requests: int, context: int) -> None:
        config, state = runner.config, runner.state
        width = config.drafts + 1
        pages = np.arange(requests * config.pages_per_row, dtype=np.int32) % (config.num_pages - 1)
        lines = pages.reshape(requests, -1)
        inits = [
            RowInit(row, seed=row, temperature=1.0, top_p=1.0, top_k=0, remaining=_ENDLESS,
                    stop_token_ids=())
            for row in range(requests)
        ]  # fmt: skip
        for init in inits:
            runner.sampler.admit(init)
            runner.shaping.admit(init)
        state.admit(inits, [PageGrant(row, 0, line) for row, line in enumerate(lines)])
        generator = torch.Generator(runner.device).manual_seed(3)
        self._tokens = torch.randint(
            *rank.tokens, (requests, width), generator=generator, device=runner.device
        )
        self._table, self._drafts = state.table[:requests], config.drafts
        self.context = context
        plan = StepPlan(0, decode=tuple(range(requests)))
        shape = Shape(requests * width, requests, mixed=False)
        self.layout: Layout = pack(plan, Places.of(plan, config.drafts, shape), state, None)
        self.place()

    def place(self) -> None:
        """Back to the context, with the tokens and drafts of the beginning."""
        table = self._table
        table[:, columns.LENGTH] = self.context
        table[:, columns.ACTIVE] = 1
        table[:, columns.REMAINING] = _ENDLESS
        table[:, columns.LAST_TOKEN] = self._tokens[:, 0]
        table[:, columns.DRAFTS : columns.DRAFTS + self._drafts] = self._tokens[:, 1:]
