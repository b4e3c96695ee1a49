# SPDX-License-Identifier: Apache-2.0
"""SharedMemoryGroup: collectives of CPU ranks on one machine, through one memfd segment.

Small sums are one-shot: everybody reads all slots and adds them (one barrier). Larger ones are
two-shot: each rank adds its share of the elements, then reads the others' sums (two barriers, a
third of the traffic at 8 ranks). Both add in rank order, element by element, so the threshold
changes no bit. Tensors larger than a slot go through in chunks. The work is in `shm_group.c`.
"""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from glmserve.errors import EngineError
from glmserve.ipc.errors import Aborted
from glmserve.parallel.native import library_fd
from glmserve.parallel.ordered_sum import accumulator_dtype
from glmserve.parallel.segment import GroupSegment

if TYPE_CHECKING:
    from glmserve.parallel.peer_memory import PeerBoundary

_ONE_SHOT_BYTES = 8 << 10  # at 8 ranks on 2 cores both ways take the same near 16 KiB
# With a core a rank a short look at the counter (about 20 us) saves a sleep and a wake-up; with
# fewer cores the looking takes the time of the very rank that is waited for.
_SPINS = 400
_DTYPES = {  # dtype_t of shm_group.c
    torch.bfloat16: 0,
    torch.float32: 1,
    torch.float64: 2,
    torch.int32: 3,
    torch.int64: 4,
}
_TIMED_OUT, _ABORTED = 1, 2


class _Group(ctypes.Structure):
    """group_t of shm_group.c."""

    _fields_ = (
        ("counters", ctypes.c_void_p * 2),
        ("buffers", ctypes.c_void_p * 2),
        ("slot_bytes", ctypes.c_int64),
        ("one_shot_bytes", ctypes.c_int64),
        ("timeout_ns", ctypes.c_int64),
        ("rank", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("spins", ctypes.c_int32),
        ("phase", ctypes.c_uint32),
    )


class SharedMemoryGroup:
    """One rank's end; `timeout` seconds bound each wait for the peers (TimeoutError)."""

    peers: PeerBoundary | None = None

    def __init__(
        self,
        segment: GroupSegment,
        rank: int,
        timeout: float | None = None,
        library: int | None = None,
    ) -> None:
        """`library`: an inherited descriptor of `native.library_fd`; None makes our own."""
        assert 0 <= rank < segment.size, (rank, segment.size)
        self.rank = rank
        self.size = segment.size
        self._segment = segment
        cores = len(os.sched_getaffinity(0))
        self._state = _Group(
            counters=segment.counters,
            buffers=segment.buffers,
            slot_bytes=segment.slot_bytes,
            one_shot_bytes=_ONE_SHOT_BYTES,
            timeout_ns=-1 if timeout is None else int(timeout * 1e9),
            rank=rank,
            size=segment.size,
            spins=_SPINS if segment.size <= cores else 0,
            phase=0,
        )
        self._pointer = ctypes.byref(self._state)
        code = ctypes.CDLL(f"/proc/self/fd/{library_fd() if library is None else library}")
        pointer, data, number = ctypes.POINTER(_Group), ctypes.c_void_p, ctypes.c_int64
        self._all_reduce = _bind(code.group_all_reduce, pointer, ctypes.c_int, data, data, number)
        self._all_gather = _bind(code.group_all_gather, pointer, data, data, number)
        self._broadcast = _bind(code.group_broadcast, pointer, data, number, ctypes.c_int)
        self._barrier = _bind(code.group_barrier, pointer)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Returns the sum in rank order. [...] bf16, fp32, fp64, int32 or int64 on CPU."""
        accumulator_dtype(x.dtype)  # refuses other types before anything is exchanged
        x = x.contiguous()
        total = torch.empty_like(x)
        self._check(
            self._all_reduce(
                self._pointer, _DTYPES[x.dtype], x.data_ptr(), total.data_ptr(), x.numel()
            )
        )
        return total

    def all_gather(self, x: Tensor) -> Tensor:
        """Returns [size, *x.shape], any dtype."""
        x = x.contiguous()
        rows = x.new_empty((self.size, *x.shape))
        self._check(self._all_gather(self._pointer, x.data_ptr(), rows.data_ptr(), x.nbytes))
        return rows

    def broadcast(self, x: Tensor, src: int) -> Tensor:
        """Returns rank `src`'s tensor, any dtype."""
        assert 0 <= src < self.size, (src, self.size)
        data = x.contiguous() if self.rank == src else torch.empty_like(x.contiguous())
        self._check(self._broadcast(self._pointer, data.data_ptr(), data.nbytes, src))
        return data

    def barrier(self) -> None:
        """Returns once every rank has called it."""
        self._check(self._barrier(self._pointer))

    def close(self) -> None:
        """Unmaps the segment; no method may be called afterwards."""
        self._segment.close()

    def _check(self, status: int) -> None:
        if status == 0:
            return
        if status == _ABORTED:
            raise Aborted("a peer ended the exchange")
        if status == _TIMED_OUT:
            raise TimeoutError(f"rank {self.rank}: the other ranks did not arrive in time")
        raise EngineError(f"rank {self.rank}: waiting for the other ranks failed")


def _bind(function: Any, *arguments: Any) -> Any:
    function.argtypes = arguments
    function.restype = ctypes.c_int
    return function
