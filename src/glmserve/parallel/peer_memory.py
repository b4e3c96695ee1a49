# SPDX-License-Identifier: Apache-2.0
"""Memory of every rank's GPU mapped into every other's, for kernels that exchange by themselves.

Allocated once through torch's symmetric memory over an existing process group; NVLink multicast
stays off (the environment that the launcher sets). Not its job: what kernels do in it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from glmserve.kernels.residual_norm import Normed


class PeerBoundary:
    """The layer boundary of one rank over peers' memory. One per process, used by one stream."""

    def __init__(self, group: dist.ProcessGroup, max_rows: int, width: int) -> None:
        """Collective: every rank of `group` calls it with the same sizes (rows of `width`)."""
        # Imports Triton, which CPU ranks do without.
        import torch.distributed._symmetric_memory as symmetric

        from glmserve.kernels.boundary.launch import PeerMemory, boundary, shared_bytes

        self._boundary = boundary

        device = torch.device("cuda", torch.cuda.current_device())
        capacity = max_rows * width
        data_bytes, flag_bytes = shared_bytes(capacity, group.size())
        self._memory = symmetric.empty(data_bytes + flag_bytes, dtype=torch.uint8, device=device)
        self._memory.zero_()
        self._handle = symmetric.rendezvous(self._memory, group)
        torch.cuda.synchronize()
        dist.barrier(group)  # no flag is raised before everyone's memory is zero
        starts = torch.tensor(list(self._handle.buffer_ptrs), dtype=torch.int64, device=device)
        self.memory = PeerMemory(
            rank=group.rank(),
            size=group.size(),
            buffers=starts,
            signals=starts + data_bytes,
            state=torch.zeros(2, dtype=torch.int32, device=device),
            capacity=capacity,
        )

    def serves(self, partial: Tensor) -> bool:
        """Whether the memory holds such rows."""
        return partial.dtype == torch.bfloat16 and partial.numel() <= self.memory.capacity

    def __call__(
        self,
        partial: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        eps: float,
        quantised: bool = False,
    ) -> tuple[Normed, Tensor]:
        """(rms_norm(s) * weight, s), s = residual + sum of partials over ranks; [R, D] bf16."""
        return self._boundary(self.memory, partial, residual, weight, eps, quantised)
