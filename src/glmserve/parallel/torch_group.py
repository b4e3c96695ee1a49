# SPDX-License-Identifier: Apache-2.0
"""TorchGroup: Gloo (CPU) and NCCL (CUDA) through torch.distributed, one group a process.

The backend only moves bytes. Sums are ours: gather everything and add in rank order, or, for
larger tensors, exchange shares, add, and gather the sums (the traffic of a ring all-reduce). A
backend's own all-reduce picks its order by size and rounds bf16 at every hop, so a row's bits would
change with the rows beside it.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from glmserve.config import Collectives
from glmserve.parallel.ordered_sum import accumulator_dtype, sum_in_rank_order
from glmserve.parallel.peer_memory import PeerBoundary

_ONE_SHOT_BYTES = 512 << 10  # one rank's tensor: above it, gathering `size` copies costs more


class TorchGroup:
    """One rank's end of the process group. Tensors are on CPU (gloo) or cuda:0 (nccl)."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.peers: PeerBoundary | None = None

    @classmethod
    def join(
        cls,
        backend: Collectives,
        rank: int,
        size: int,
        port: int,
        listen_fd: int,
        timeout: float,
    ) -> TorchGroup:
        """Meets the other ranks at 127.0.0.1:`port`, whose listening socket rank 0 inherited."""
        limit = timedelta(seconds=timeout)
        store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1",
            port,
            world_size=size,
            is_master=rank == 0,
            timeout=limit,
            master_listen_fd=listen_fd if rank == 0 else None,
        )
        device = torch.device("cuda:0") if backend == "nccl" else None
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=size, timeout=limit, device_id=device
        )
        return cls(rank, size)

    def share_memory(self, max_rows: int, width: int) -> None:
        """Collective, NCCL only: maps memory for layer boundaries of up to `max_rows` rows of
        `width` bf16 values into every rank, 8 * max_rows * width bytes each."""
        assert dist.group.WORLD is not None
        self.peers = PeerBoundary(dist.group.WORLD, max_rows, width)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Returns the sum in rank order. [...] bf16, fp32, fp64, int32 or int64."""
        accumulator_dtype(x.dtype)  # refuses other types before anything is exchanged
        flat = x.detach().contiguous().view(-1)
        count = flat.numel()
        if count * flat.element_size() <= _ONE_SHOT_BYTES:
            return sum_in_rank_order(self._gather(flat).unbind(0)).view(x.shape)
        share = -(-count // self.size)
        if share * self.size != count:
            flat = torch.nn.functional.pad(flat, (0, share * self.size - count))
        parts = torch.empty_like(flat)
        dist.all_to_all_single(parts.view(torch.uint8), flat.view(torch.uint8))
        total = sum_in_rank_order(parts.view(self.size, share).unbind(0))
        return self._gather(total).view(-1)[:count].view(x.shape)

    def all_gather(self, x: Tensor) -> Tensor:
        """Returns [size, *x.shape], any dtype."""
        return self._gather(x.detach().contiguous().view(-1)).view(self.size, *x.shape)

    def broadcast(self, x: Tensor, src: int) -> Tensor:
        """Returns rank `src`'s tensor, any dtype."""
        flat = x.detach().contiguous().view(-1)
        received = flat if self.rank == src else torch.empty_like(flat)
        if flat.numel():
            dist.broadcast(received.view(torch.uint8), src)
        return received.view(x.shape)

    def barrier(self) -> None:
        """Returns once every rank has called it."""
        dist.barrier()

    def close(self) -> None:
        """Leaves the process group; all ranks must be alive."""
        dist.destroy_process_group()

    def _gather(self, flat: Tensor) -> Tensor:
        gathered = flat.new_empty(self.size * flat.numel())
        if flat.numel():
            # Bytes: Gloo knows fewer dtypes than we move.
            dist.all_gather_into_tensor(gathered.view(torch.uint8), flat.view(torch.uint8))
        return gathered.view(self.size, flat.numel())
