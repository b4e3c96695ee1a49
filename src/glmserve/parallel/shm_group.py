# SPDX-License-Identifier: Apache-2.0
"""SharedMemoryGroup: collectives of CPU ranks on one machine, through one memfd segment.

Small sums are one-shot: everybody reads all slots and adds them (one barrier). Larger ones are
two-shot: each rank adds its share of the elements, then reads the others' sums (two barriers, a
third of the traffic at 8 ranks). Both add in rank order, element by element, so the threshold
changes no bit. Tensors larger than a slot go through in chunks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from glmserve.parallel.ordered_sum import accumulator_dtype, sum_in_rank_order
from glmserve.parallel.segment import GroupSegment

_ONE_SHOT_BYTES = 32 << 10  # measured crossover: bench/collectives.py


class SharedMemoryGroup:
    """One rank's end; `timeout` seconds bound each wait for the peers (TimeoutError)."""

    def __init__(self, segment: GroupSegment, rank: int, timeout: float | None = None) -> None:
        assert 0 <= rank < segment.size, (rank, segment.size)
        self.rank = rank
        self.size = segment.size
        self._segment = segment
        self._timeout = timeout
        buffers = [torch.frombuffer(segment.buffer(turn), dtype=torch.uint8) for turn in (0, 1)]
        self._bytes = [b.view(self.size, segment.slot_bytes) for b in buffers]
        self._slots: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}

    def all_reduce(self, x: Tensor) -> Tensor:
        """Returns the sum in rank order. [...] bf16, fp16, fp32, fp64, int32 or int64 on CPU."""
        accumulator_dtype(x.dtype)  # refuses other types before anything is exchanged
        flat = x.detach().contiguous().view(-1)
        total = torch.empty_like(flat)
        for start, end in self._chunks(flat.numel(), flat.element_size()):
            source, target = flat[start:end], total[start:end]
            if (end - start) * flat.element_size() <= _ONE_SHOT_BYTES:
                slots = self._exchange(source)
                target.copy_(sum_in_rank_order([slot[: end - start] for slot in slots]))
            else:
                self._two_shot(source, target)
        return total.view(x.shape)

    def all_gather(self, x: Tensor) -> Tensor:
        """Returns [size, *x.shape], any dtype."""
        flat = x.detach().contiguous().view(-1)
        gathered = torch.empty((self.size, flat.numel()), dtype=x.dtype)
        for start, end in self._chunks(flat.numel(), flat.element_size()):
            slots = self._exchange(flat[start:end])
            for row, slot in zip(gathered, slots, strict=True):
                row[start:end] = slot[: end - start]
        return gathered.view(self.size, *x.shape)

    def broadcast(self, x: Tensor, src: int) -> Tensor:
        """Returns rank `src`'s tensor, any dtype."""
        flat = x.detach().contiguous().view(-1)
        received = flat if self.rank == src else torch.empty_like(flat)
        for start, end in self._chunks(flat.numel(), flat.element_size()):
            slots = self._exchange(flat[start:end] if self.rank == src else flat[:0])
            if self.rank != src:
                received[start:end] = slots[src][: end - start]
        return received.view(x.shape)

    def barrier(self) -> None:
        """Returns once every rank has called it."""
        self._segment.barrier(self._timeout)

    def close(self) -> None:
        """Unmaps the segment; tensors that were returned are not part of it."""
        self._slots.clear()
        self._bytes.clear()
        self._segment.close()

    def _chunks(self, count: int, element_size: int) -> list[tuple[int, int]]:
        step = self._segment.slot_bytes // element_size
        return [(start, min(start + step, count)) for start in range(0, count, step)]

    def _exchange(self, mine: Tensor) -> list[Tensor]:
        """Publishes `mine` (1-D, fits a slot) and returns the slots of all ranks.

        The slots may be read until this rank's next exchange but one... see GroupSegment.
        """
        turn = self._segment.turn
        slots = self._slots_of(mine.dtype)[turn]
        slots[self.rank][: mine.numel()] = mine
        self._segment.barrier(self._timeout)
        return slots

    def _two_shot(self, source: Tensor, target: Tensor) -> None:
        count = source.numel()
        bounds = [count * rank // self.size for rank in range(self.size + 1)]
        low, high = bounds[self.rank], bounds[self.rank + 1]
        slots = self._exchange(source)
        share = sum_in_rank_order([slot[low:high] for slot in slots])
        for rank, slot in enumerate(self._exchange(share)):
            target[bounds[rank] : bounds[rank + 1]] = slot[: bounds[rank + 1] - bounds[rank]]

    def _slots_of(self, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
        """Returns, for both buffers, the ranks' slots as 1-D tensors of `dtype`."""
        if dtype not in self._slots:
            first, second = (list(buffer.view(dtype).unbind(0)) for buffer in self._bytes)
            self._slots[dtype] = (first, second)
        return self._slots[dtype]
