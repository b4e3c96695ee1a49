# SPDX-License-Identifier: Apache-2.0
"""The sampler over two GPUs: the reference's ids, on both, eagerly and as a graph's replay."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from glmserve.parallel.group import SingleGroup
from glmserve.parallel.torch_group import TorchGroup
from glmserve.runtime.sampler import Sampler, SamplingRows
from tests.two_gpus import needs_two_gpus, on_two_gpus

WIDTH, VALID = 19_360, 2 * 19_360 - 200
COUNTS = (1, 6, 48)


def some_rows(count: int) -> tuple[Tensor, SamplingRows]:
    """Logits of the whole vocabulary, the same on every rank; greedy, plain and limited rows."""
    generator = torch.Generator().manual_seed(count)
    logits = 4 * torch.randn(count, 2 * WIDTH, generator=generator)
    kind = torch.arange(count) % 4
    rows = SamplingRows(
        torch.where(kind == 0, 0.0, 0.8).to(torch.float64),
        torch.where(kind == 2, 0.9, 1.0).to(torch.float64),
        torch.where(kind >= 2, 40, 0),
        torch.where(kind == 3, 0.05, 0.0).to(torch.float64),
        torch.arange(count) * 977,
        torch.arange(count),
        torch.arange(count) + 100,
    )
    return logits, rows


def _draw(rank: int) -> None:
    device = torch.device("cuda", rank)
    sampler = Sampler(TorchGroup(rank, 2), WIDTH, VALID, device)
    reference = Sampler(SingleGroup(), 2 * WIDTH, VALID, torch.device("cpu"))
    sampler.prepare(max(COUNTS))
    for count in COUNTS:
        logits, rows = some_rows(count)
        shard = logits[:, rank * WIDTH : (rank + 1) * WIDTH].to(device).contiguous()
        there = SamplingRows(
            *(getattr(rows, name).to(device) for name in rows.__dataclass_fields__)
        )
        for limits in (False, True):
            want = reference.sample(logits, rows, limits)
            assert torch.equal(sampler.sample(shard, there, limits).cpu(), want), (count, limits)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                drawn = sampler.sample(shard, there, limits)
            for _ in range(3):
                drawn.zero_()
                graph.replay()
                assert torch.equal(drawn.cpu(), want), (count, limits)
        assert torch.equal(sampler.greedy(shard).cpu(), reference.greedy(logits)), count


@pytest.mark.gpu
@needs_two_gpus
def test_two_gpus_draw_the_references_ids() -> None:
    on_two_gpus(_draw)
