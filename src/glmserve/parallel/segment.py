# SPDX-License-Identifier: Apache-2.0
"""The shared memory of a CPU group: a barrier and two buffers of one slot a rank. No torch.

One rule covers every collective: a rank writes its slot of the current buffer, passes the barrier,
and may then read all slots of that buffer. The next exchange uses the other buffer, and a buffer
comes up again only behind the following barrier, which everybody reaches after its last read.
Not its job: tensors (see `shm_group`).
"""

from __future__ import annotations

import mmap
from typing import Self

from glmserve.ipc.futex import STEP, WaitWord, deadline_after
from glmserve.ipc.shm import SharedMemory

_DATA = mmap.PAGESIZE  # slots start here; before them: size, slot bytes, two counters


class GroupSegment:
    """One process's view of the segment; belongs to one thread, except for abort()."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self.size, self.slot_bytes = memory.words[0], memory.words[1]
        self._counters = (WaitWord(memory, 1), WaitWord(memory, 2))
        self._phase = 0  # barriers passed, modulo 4

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
    def turn(self) -> int:
        """Index of the buffer to write before, and to read after, the next barrier."""
        return self._phase & 1

    def buffer(self, turn: int) -> memoryview:
        """Returns buffer `turn`: `size` slots of `slot_bytes`, in rank order."""
        length = self.size * self.slot_bytes
        start = _DATA + turn * length
        return self._memory.buffer[start : start + length]

    def barrier(self, timeout: float | None = None) -> None:
        """Returns once every rank has called it; raises TimeoutError or Aborted.

        The two counters take turns, each counting up to `size` and the next time back down to 0,
        so none is ever reset. The last rank to arrive wakes the others: one call a rank.
        """
        word = self._counters[self._phase & 1]
        if self._phase < 2:
            target = self.size * STEP
            word.add_and_wake_if(1, target - STEP)
        else:
            target = 0
            word.add_and_wake_if(-1, STEP)
        self._phase = (self._phase + 1) & 3
        value = word.load()
        if value != target:
            deadline = deadline_after(timeout)
            while value != target:
                value = word.wait_change(value, deadline)

    def abort(self) -> None:
        """Makes every barrier of every rank, now and later, raise Aborted."""
        for word in self._counters:
            word.abort()

    def close(self) -> None:
        """Unmaps this process's view."""
        self._memory.close()
