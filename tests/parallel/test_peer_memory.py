# SPDX-License-Identifier: Apache-2.0
"""The layer boundary between real ranks, one GPU each, launches of all sizes in a row."""

from __future__ import annotations

import os
import socket
from multiprocessing import resource_tracker

import pytest
import torch

WIDTH, LAUNCHES = 512, 60


def _rank_main(rank: int, size: int, port: int) -> None:
    import torch.distributed as dist

    from glmserve.kernels.boundary import boundary_reference
    from glmserve.kernels.boundary.launch import boundary
    from glmserve.parallel.peer_memory import PeerBoundary

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", rank=rank, world_size=size, device_id=torch.device("cuda", rank)
    )
    assert dist.group.WORLD is not None
    peers = PeerBoundary(dist.group.WORLD, 300, WIDTH)
    weight = torch.linspace(0.5, 1.5, WIDTH, device="cuda").bfloat16()
    for launch in range(LAUNCHES):
        rows = (1, 6, 300, 33, 129)[launch % 5]
        generators = [
            torch.Generator("cuda").manual_seed(100 * launch + r) for r in range(size + 1)
        ]
        drawn = [torch.randn(rows, WIDTH, device="cuda", generator=g) for g in generators]
        partials, residual = [x.bfloat16() for x in drawn[:size]], drawn[size].bfloat16()
        if launch % size == rank:
            torch.cuda._sleep(300_000)  # the others are there long before
        (normed, _), total = boundary(
            peers.memory, partials[rank], residual, weight, 1e-5, two_shot=launch % 2 == 1
        )
        want_normed, want_total = boundary_reference(partials, residual, weight, 1e-5)
        assert torch.equal(total, want_total), (launch, rows)
        assert (normed.float() - want_normed.float()).abs().max() <= 0.05, (launch, rows)
        everyone = [torch.empty_like(normed) for _ in range(size)]
        dist.all_gather(everyone, normed)
        assert all(torch.equal(everyone[0], other) for other in everyone), (launch, rows)
    dist.destroy_process_group()


@pytest.mark.gpu
def test_ranks_on_two_gpus_get_the_same_bits() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs that see each other")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(_rank_main, (2, port), nprocs=2)  # raises what a rank raised
    # Python's own helper of spawned processes would stay until this process ends.
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]
