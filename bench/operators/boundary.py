# SPDX-License-Identifier: Apache-2.0
"""The layer boundary over peers' memory: configurations only; `bench/boundary.py` runs it, since a
launch needs every rank's process."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from bench.registry import Case
from glmserve.kernels.boundary.launch import PeerMemory, boundary

WIDTH = 6144


def launches(device: torch.device) -> Iterator[tuple[str, Callable[[], object]]]:
    for size in (2, 4, 8):
        table = torch.empty(size, dtype=torch.int64, device=device)
        state = torch.empty(2, dtype=torch.int32, device=device)
        memory = PeerMemory(1, size, table, table, state, 2048 * WIDTH)
        x = torch.empty(64, WIDTH, dtype=torch.bfloat16, device=device)
        for two_shot in (False, True):
            yield (
                f"{size} ranks, two-shot {two_shot}",
                lambda m=memory, x=x, t=two_shot: boundary(m, x, x, x[0], 1e-5, two_shot=t),
            )


def cases() -> Iterator[Case]:
    return iter(())
