# SPDX-License-Identifier: Apache-2.0
"""Anonymous shared memory (memfd): a child gets it by inheriting the file descriptor.

Nothing is named under /dev/shm, so nothing is left behind however the processes end, and a small
/dev/shm of a container does not limit it. Pages are taken when they are first touched.
Not its job: who writes what and when (see `futex`, `ring`).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from typing import Self

_PAGE = mmap.PAGESIZE


class SharedMemory:
    """A zero-filled mapping of `size` bytes (rounded up to pages) behind the descriptor `fd`."""

    def __init__(self, fd: int) -> None:
        """Maps `fd` and owns it from now on."""
        self.fd = fd
        self.size = os.fstat(fd).st_size
        self._map = mmap.mmap(fd, self.size)
        self.buffer = memoryview(self._map)  # bytes
        self.words = self.buffer.cast("I")  # the same memory as 32-bit words
        # The mapping does not move before close(), so the address may outlive this export.
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    @classmethod
    def create(cls, size: int, name: str) -> Self:
        """Makes new memory; `name` only shows up in /proc/<pid>/maps."""
        fd = os.memfd_create(f"glmserve-{name}", os.MFD_CLOEXEC)
        os.ftruncate(fd, -(-size // _PAGE) * _PAGE)
        return cls(fd)

    @classmethod
    def attach(cls, fd: int) -> Self:
        """Maps memory that another process made; `fd` was inherited."""
        return cls(fd)

    def close(self) -> None:
        """Gives the mapping and the descriptor up; the memory goes with its last user."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self.words.release()
            self.buffer.release()
            with contextlib.suppress(BufferError):  # an array over it still lives: it frees the map
                self._map.close()
