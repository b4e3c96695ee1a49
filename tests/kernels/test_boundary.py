# SPDX-License-Identifier: Apache-2.0
"""The layer boundary with all ranks in one process: a phase of every rank, then the next.

What needs ranks that run at the same time (waiting, memory order) is checked on GPUs by
bench/boundary.py.
"""

from __future__ import annotations

import pytest
import torch

from glmserve.kernels.boundary import boundary_reference, launch
from glmserve.kernels.quantise.reference import quantise
from tests.tolerances import assert_close

WIDTH, ROWS = 384, 16


def make_group(size: int, device: torch.device) -> tuple[list[launch.PeerMemory], object]:
    """One view a rank, and what keeps their memory alive."""
    capacity = ROWS * WIDTH
    data, flags = launch.shared_bytes(capacity, size)
    buffers = [torch.zeros(data, dtype=torch.uint8, device=device) for _ in range(size)]
    signals = [torch.zeros(flags, dtype=torch.uint8, device=device) for _ in range(size)]
    tables = [
        torch.tensor([t.data_ptr() for t in each], device=device) for each in (buffers, signals)
    ]
    memories = [
        launch.PeerMemory(
            rank, size, *tables, torch.zeros(2, dtype=torch.int32, device=device), capacity
        )
        for rank in range(size)
    ]
    return memories, (buffers, signals)


@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_gets_the_bits_of_the_rank_order_sum(
    device: torch.device, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    memories, alive = make_group(size, device)
    monkeypatch.setattr(launch, "MAX_PROGRAMS", 4)  # so that programs have several rows
    weight = torch.randn(WIDTH).bfloat16().to(device)
    for rows, two_shot in ((1, False), (5, True), (16, True), (7, False), (3, True)):
        partials = [torch.randn(rows, WIDTH) * 10 ** (r % 3) for r in range(size)]
        shares = [p.bfloat16().to(device) for p in partials]
        residual = torch.randn(rows, WIDTH).bfloat16().to(device) if rows > 3 else None
        outs = [(torch.empty_like(shares[0]), torch.empty_like(shares[0])) for _ in range(size)]
        fp8 = []
        for phase in (1, 2, 3) if two_shot else (1, 3):
            fp8.clear()
            for rank in range(size):
                normed, _ = launch.boundary(
                    memories[rank], shares[rank], residual, weight, 1e-5, rows % 2 == 1, two_shot,
                    phase, outs[rank],
                )  # fmt: skip
                fp8.append(normed.quantised)
        want, want_total = boundary_reference(shares, residual, weight, 1e-5)
        for normed, total in outs:
            assert torch.equal(total, want_total)
            assert torch.equal(normed, outs[0][0])
        assert_close("normed", want, outs[0][0], "operator_bf16")
        for part in fp8:
            assert (part is None) == (rows % 2 == 0)
            if part is not None:
                same = quantise(outs[0][0])
                assert torch.equal(part.scales, same.scales)
                assert torch.equal(part.values.float(), same.values.float())
    assert [memory.state.tolist() for memory in memories] == [[5, 0]] * size
    assert alive is not None
