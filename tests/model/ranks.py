# SPDX-License-Identifier: Apache-2.0
"""Ranks of a model as threads of the test process, and one greedy run with drafts on them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from glmserve.checkpoint.reader import load_weights
from glmserve.model.batch import StepBatch
from glmserve.model.caches import Caches
from glmserve.model.decoder import Decoder
from glmserve.model.mtp import Mtp
from glmserve.model.taps import Taps
from glmserve.model_config import ExpertLayout, ModelConfig
from glmserve.parallel.group import Group, SingleGroup
from glmserve.parallel.segment import GroupSegment
from glmserve.parallel.shm_group import SharedMemoryGroup

PAGE_SIZE = 64
GOLDEN_EPS = 1e-6  # transformers' latent norm eps
_WAIT = 60.0  # seconds that a rank waits for its peers before the test fails

T = TypeVar("T")


@dataclass
class Model:
    """One rank's model and caches."""

    config: ModelConfig
    group: Group
    decoder: Decoder
    mtp: Mtp
    caches: Caches

    def logits(self, hidden: Tensor) -> Tensor:
        """All columns, gathered: [R, V]."""
        return torch.cat(list(self.group.all_gather(self.decoder.logits(hidden))), dim=1)


def load(
    directory: Path,
    dtype: torch.dtype,
    group: Group | None = None,
    layout: ExpertLayout = "ep",
    pages: int = 8,
) -> Model:
    group = group or SingleGroup()
    config = ModelConfig.from_file(directory / "config.json")
    weights = load_weights(directory, config, group.rank, group.size, layout, dtype)
    return Model(
        config,
        group,
        Decoder(config, weights, group, latent_norm_eps=GOLDEN_EPS),
        Mtp(config, weights, group, latent_norm_eps=GOLDEN_EPS),
        Caches.allocate(config, pages, PAGE_SIZE, dtype, "cpu"),
    )


def on_ranks(size: int, work: Callable[[Group], T]) -> list[T]:
    """Runs `work` once a rank, in threads over the shared-memory group; results in rank order."""
    if size == 1:
        with torch.inference_mode():
            return [work(SingleGroup())]
    segment = GroupSegment.create(size)
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        own = GroupSegment.attach(os.dup(segment.fd))
        try:
            with torch.inference_mode():  # a thread's own setting
                results[rank] = work(SharedMemoryGroup(own, rank, timeout=_WAIT))
        except BaseException as error:
            errors.append(error)
            own.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]


def batch_of(tokens: Tensor, start: int, page_table: Tensor, line: int = 0) -> StepBatch:
    """Rows of one sequence at positions start, start + 1, ..."""
    count = len(tokens)
    return StepBatch(
        tokens, torch.arange(start, start + count), torch.full((count,), line), page_table
    )


@dataclass
class Run:
    """What a greedy run of one sequence gave."""

    prompt_logits: Tensor  # [T, V]
    tokens: list[int]
    hidden: Tensor  # [T + new - 1, D]
    mtp_hidden: Tensor  # [T + new - 1, D]
    mtp_selected: Tensor  # [T + new - 1, k]
    drafts: dict[bool, list[int]]  # by whether later passes share the first pass's selection
    taps: list[Taps] = field(default_factory=list)  # of each prompt chunk


def greedy(
    model: Model,
    prompt: Tensor,
    new: int,
    page_table: Tensor,
    chunk: int = 1 << 20,
    drafts: int = 5,
) -> Run:
    """Prefill in chunks, decode one by one, then MTP over everything and drafts at the end."""
    logits, hidden, taps = [], [], []
    for start in range(0, len(prompt), chunk):
        taps.append(Taps())
        batch = batch_of(prompt[start : start + chunk], start, page_table)
        hidden.append(model.decoder.forward(batch, model.caches, taps[-1]))
        logits.append(model.logits(hidden[-1]))
    tokens = [int(logits[-1][-1].argmax())]
    for i in range(new - 1):
        batch = batch_of(torch.tensor(tokens[-1:]), len(prompt) + i, page_table)
        hidden.append(model.decoder.forward(batch, model.caches))
        tokens.append(int(model.logits(hidden[-1])[0].argmax()))
    states = torch.cat(hidden)
    sequence = torch.cat([prompt, torch.tensor(tokens)])
    outs, selected = [], []
    for start in range(0, len(states), chunk):
        part = slice(start, min(start + chunk, len(states)))
        batch = batch_of(sequence[:-1][part], start, page_table)
        out, selection = model.mtp.forward(
            batch, sequence[1:][part], states[part], model.caches, None, write_index=True
        )
        outs.append(out)
        selected.append(selection.positions)
    last = torch.tensor([len(batch.tokens) - 1])
    drafted: dict[bool, list[int]] = {}
    for share in (False, True):
        row, state, kept = batch.select(last), out[last], selection.select(last)
        drafted[share] = [int(model.logits(state)[0].argmax())]
        for _ in range(drafts - 1):
            row = row.advance()
            token = torch.tensor(drafted[share][-1:])
            state, _ = model.mtp.forward(
                row, token, state, model.caches, kept if share else None, not share
            )
            drafted[share].append(int(model.logits(state)[0].argmax()))
    width = max(s.shape[1] for s in selected)
    padded = [torch.nn.functional.pad(s, (0, width - s.shape[1]), value=-1) for s in selected]
    return Run(torch.cat(logits), tokens, states, torch.cat(outs), torch.cat(padded), drafted, taps)


def mask_of(positions: Tensor, length: int) -> Tensor:
    """Selections [R, k] padded with -1 -> bool [R, length]."""
    mask = torch.zeros(len(positions), length + 1, dtype=torch.bool)
    mask.scatter_(1, positions.long().masked_fill(positions < 0, length), True)
    return mask[:, :length]
