# SPDX-License-Identifier: Apache-2.0
"""The layer boundary between real ranks, one GPU each, launches of all sizes in a row."""

from __future__ import annotations

import pytest
import torch

from tests.two_gpus import needs_two_gpus, on_two_gpus

WIDTH, LAUNCHES, RANKS = 512, 60, 2


def _cross_the_boundary(rank: int) -> None:
    import torch.distributed as dist

    from glmserve.kernels.boundary import boundary_reference
    from glmserve.kernels.boundary.launch import boundary
    from glmserve.parallel.peer_memory import PeerBoundary

    assert dist.group.WORLD is not None
    peers = PeerBoundary(dist.group.WORLD, 300, WIDTH)
    weight = torch.linspace(0.5, 1.5, WIDTH, device="cuda").bfloat16()
    for launch in range(LAUNCHES):
        rows = (1, 6, 300, 33, 129)[launch % 5]
        generators = [
            torch.Generator("cuda").manual_seed(100 * launch + r) for r in range(RANKS + 1)
        ]
        drawn = [torch.randn(rows, WIDTH, device="cuda", generator=g) for g in generators]
        partials, residual = [x.bfloat16() for x in drawn[:RANKS]], drawn[RANKS].bfloat16()
        if launch % RANKS == rank:
            torch.cuda._sleep(300_000)  # the others are there long before
        (normed, _), total = boundary(
            peers.memory, partials[rank], residual, weight, 1e-5, two_shot=launch % 2 == 1
        )
        want_normed, want_total = boundary_reference(partials, residual, weight, 1e-5)
        assert torch.equal(total, want_total), (launch, rows)
        assert (normed.float() - want_normed.float()).abs().max() <= 0.05, (launch, rows)
        everyone = [torch.empty_like(normed) for _ in range(RANKS)]
        dist.all_gather(everyone, normed)
        assert all(torch.equal(everyone[0], other) for other in everyone), (launch, rows)


@pytest.mark.gpu
@needs_two_gpus
def test_ranks_on_two_gpus_get_the_same_bits() -> None:
    on_two_gpus(_cross_the_boundary)
