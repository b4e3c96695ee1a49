# SPDX-License-Identifier: Apache-2.0
"""A group whose other ranks are not there: one rank of N runs alone, for `glmserve bench-rank`.

Every exchange has the shapes and moves the bytes of the real one, within the memory of one device.
The others' partial sums are zeros, so sums are this rank's own, and what is gathered is this rank's
own N times. The layer boundary runs the kernel over peers' memory itself, its peers being buffers
beside each other whose flags are up; where it divides the rows among ranks, the others' rows come
out as the random ones that those buffers hold. Not its job: the time of links.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from glmserve.kernels.residual_norm import Normed
from glmserve.parallel.ordered_sum import sum_in_rank_order
from glmserve.parallel.peer_memory import PeerBoundary

_ONE_SHOT_BYTES = 512 << 10  # as torch_group: above it, ranks exchange shares of a sum
_RAISED = 1 << 30  # launches that a peer which never comes has made


class StandInGroup:
    """Rank `rank` of `size`; `received` counts the bytes that would have come from other ranks."""

    def __init__(self, rank: int, size: int) -> None:
        assert 0 <= rank < size, (rank, size)
        self.rank, self.size = rank, size
        self.peers: PeerBoundary | None = None
        self.received: Counter[str] = Counter()

    def share_memory(self, max_rows: int, width: int) -> None:
        """CUDA only: buffers for layer boundaries of up to `max_rows` rows of `width` values."""
        self.peers = StandInPeers(self, max_rows, width, torch.device("cuda:0"))

    def all_reduce(self, x: Tensor) -> Tensor:
        """x's values, after the traffic of a sum."""
        flat = x.contiguous().view(-1)
        others = self.size - 1
        if flat.nbytes <= _ONE_SHOT_BYTES:
            self.received["all_reduce"] += others * flat.nbytes
            everyone = flat.new_zeros(self.size, len(flat))
            everyone[self.rank] = flat
            return sum_in_rank_order(everyone.unbind(0)).view(x.shape)
        share = -(-len(flat) // self.size)
        self.received["all_reduce"] += 2 * others * share * flat.element_size()
        parts = flat.new_zeros(self.size, share)  # what an all-to-all would bring
        parts.view(-1)[: len(flat)] = flat
        sum_in_rank_order(parts.unbind(0))
        return flat.clone().view(x.shape)  # what gathering the sums would bring

    def all_gather(self, x: Tensor) -> Tensor:
        self.received["all_gather"] += (self.size - 1) * x.nbytes
        return x.unsqueeze(0).expand(self.size, *x.shape).contiguous()

    def broadcast(self, x: Tensor, src: int) -> Tensor:
        assert 0 <= src < self.size, (src, self.size)
        if src == self.rank:
            return x
        self.received["broadcast"] += x.nbytes
        return x.clone()

    def barrier(self) -> None:
        pass

    def close(self) -> None:
        pass


class StandInPeers(PeerBoundary):
    """The kernel of the layer boundary between this rank and buffers."""

    def __init__(
        self, group: StandInGroup, max_rows: int, width: int, device: torch.device
    ) -> None:
        # Imports Triton, which CPU ranks do without.
        from glmserve.kernels.boundary.launch import (
            PeerMemory,
            boundary,
            shared_bytes,
            takes_two_shots,
        )

        self._boundary, self._two_shots, self._group = boundary, takes_two_shots, group
        size, capacity = group.size, max_rows * width
        data_bytes, flag_bytes = shared_bytes(capacity, size)
        self._buffers = torch.zeros(size, data_bytes, dtype=torch.uint8, device=device)
        flags = torch.full((size, flag_bytes // 4), _RAISED, dtype=torch.int32, device=device)
        flags[:, group.rank :: size] = 0
        self._flags = flags
        own = self._buffers[group.rank].view(torch.bfloat16).view(4, capacity)
        generator = torch.Generator(device).manual_seed(1)
        own[2:].normal_(generator=generator)  # the others' shares of the sums

        def addresses(x: Tensor) -> Tensor:
            return x.data_ptr() + torch.arange(size, device=device) * x.stride(0) * x.itemsize

        self.memory = PeerMemory(
            rank=group.rank,
            size=size,
            buffers=addresses(self._buffers),
            signals=addresses(flags),
            state=torch.zeros(2, dtype=torch.int32, device=device),
            capacity=capacity,
        )

    def __call__(
        self,
        partial: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        eps: float,
        quantised: bool = False,
    ) -> tuple[Normed, Tensor]:
        memory = self.memory
        others = memory.size - 1
        if self._two_shots(memory.size, *partial.shape):
            self._group.received["boundary"] += 2 * others * partial.nbytes // memory.size
        else:
            self._group.received["boundary"] += others * partial.nbytes
        return super().__call__(partial, residual, weight, eps, quantised)
