# SPDX-License-Identifier: Apache-2.0
"""The stand-in group: values of a lone rank, traffic of N."""

from __future__ import annotations

import pytest
import torch

from glmserve.checkpoint.declared import open_source
from glmserve.checkpoint.ledger import ledger
from glmserve.parallel.collectives import all_reduce_residual_rms_norm
from glmserve.parallel.stand_in import StandInGroup

WIDTH = 6144


@pytest.mark.parametrize("rows", [1, 7, 300])  # both forms of a sum
def test_a_sum_is_the_ranks_own_part(rows: int) -> None:
    group = StandInGroup(3, 8)
    x = torch.randn(rows, 1000).bfloat16()
    assert torch.equal(group.all_reduce(x), x)


def test_what_is_gathered_is_the_ranks_own() -> None:
    rank, group = 2, StandInGroup(2, 4)
    x = torch.arange(6).view(2, 3)
    assert torch.equal(group.all_gather(x), torch.stack([x] * 4))
    assert torch.equal(group.broadcast(x, 0), x)
    assert torch.equal(group.broadcast(x, rank), x)
    assert group.received == {"all_gather": 3 * x.nbytes, "broadcast": x.nbytes}


@pytest.mark.parametrize(("rows", "two_shot"), [(4, False), (2048, True)])
def test_a_sum_moves_the_bytes_of_the_ledger(rows: int, two_shot: bool) -> None:
    group = StandInGroup(0, 8)
    group.all_reduce(torch.zeros(rows, WIDTH, dtype=torch.bfloat16))
    made = ledger(open_source("glm-5.2-fp8"), 8, rows, 8192, 0)
    boundary = next(c for c in made.collectives if c.name == "target boundaries")
    want = boundary.two_shot if two_shot else boundary.one_shot
    assert group.received["all_reduce"] == want / boundary.count


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 6, 192])
def test_the_boundary_kernel_runs_between_stand_ins(rows: int) -> None:
    group = StandInGroup(2, 8)
    group.share_memory(256, WIDTH)
    generator = torch.Generator("cuda").manual_seed(rows)
    partial, residual = (
        torch.randn(rows, WIDTH, generator=generator, device="cuda").bfloat16() for _ in range(2)
    )
    weight = torch.ones(WIDTH, device="cuda").bfloat16()
    for launches in range(1, 4):
        (normed, _), total = all_reduce_residual_rms_norm(group, partial, residual, weight, 1e-5)
        # In two shots, 96 programs have two rows each, which the ranks sum in turn.
        row = torch.arange(rows, device="cuda")
        own = row >= 0 if rows < 192 else (row % 96 + row // 96) % 8 == group.rank
        want = (partial.float() + residual.float()).bfloat16()
        assert torch.equal(total[own], want[own])
        length = normed.float().pow(2).mean(dim=1)
        assert torch.allclose(length, torch.ones_like(length), atol=0.02)
        share = 7 if rows < 192 else 2 * 7 / 8
        assert group.received["boundary"] == launches * share * partial.nbytes
