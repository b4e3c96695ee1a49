# SPDX-License-Identifier: Apache-2.0
"""The shared memory of a CPU group: two counters, and two buffers of one slot a rank. No torch.

One rule covers every collective: a rank writes its slot of the current buffer, passes the barrier,
and may then read all slots of that buffer. The next exchange uses the other buffer, and a buffer
comes up again only behind the following barrier, which everybody reaches after its last read.
Not its job: the exchanges themselves (`shm_group.c`, called by `shm_group`).
"""

from __future__ import annotations

import mmap
from typing import Self

from glmserve.ipc.futex import STRIDE, WaitWord
from glmserve.ipc.shm import SharedMemory

_DATA = mmap.PAGESIZE  # slots start here; before them: size and slot bytes, then the counters


class GroupSegment:
    """One process's view of the segment."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self.size, self.slot_bytes = memory.words[0], memory.words[1]

    @classmethod
    def create(cls, size: int, slot_bytes: int = 256 << 10) -> Self:
        """Makes the segment of `size` ranks; a slot holds `slot_bytes` (a multiple of 64)."""
        assert size >= 1, size
        assert slot_bytes % 64 == 0, slot_bytes
        memory = SharedMemory.create(_DATA + 2 * size * slot_bytes, "group")
        memory.words[0], memory.words[1] = size, slot_bytes
        return cls(memory)

    @classmethod
    def attach(cls, fd: int) -> Self:
        """Opens a segment whose descriptor was inherited."""
        return cls(SharedMemory.attach(fd))

    @property
    def fd(self) -> int:
        return self._memory.fd

    @property
    def counters(self) -> tuple[int, int]:
        """Addresses of the barrier's wait words, used in turns."""
        return self._memory.address + STRIDE, self._memory.address + 2 * STRIDE

    @property
    def buffers(self) -> tuple[int, int]:
        """Addresses of the two buffers."""
        first = self._memory.address + _DATA
        return first, first + self.size * self.slot_bytes

    def abort(self) -> None:
        """Makes every wait of every rank, now and later, raise Aborted."""
        for index in (1, 2):
            WaitWord(self._memory, index).abort()

    def close(self) -> None:
        """Unmaps this process's view; no collective may be running in it."""
        self._memory.close()
