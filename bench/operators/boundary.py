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
        # The forms of a layer; the embedding's, without a residual, compile alike: one of them.
        forms = [(x, two_shot, fp8) for two_shot in (False, True) for fp8 in (False, True)]
        forms += [(None, False, True)] if size == 8 else []
        for residual, two_shot, fp8 in forms:
            yield (
                f"{size} ranks, two-shot {two_shot}, fp8 {fp8}",
                lambda m=memory, x=x, r=residual, t=two_shot, q=fp8: boundary(
                    m, x, r, x[0], 1e-5, q, t
                ),
            )


def cases() -> Iterator[Case]:
    return iter(())
