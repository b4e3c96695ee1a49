# SPDX-License-Identifier: Apache-2.0
"""BroadcastRing: one writer, N readers, messages of any length up to the ring's capacity.

Every reader gets every message in order. `send` waits while the slowest reader has not yet freed
the space that it needs. With one reader it carries results back. A message is copied in once and
out once per reader; nobody spins (see `futex` for why).
Layout: one wait word for messages sent, one a reader for messages taken, then `capacity` bytes of
frames (8 bytes of length, the message, padding to 8), which wrap around.
Not its job: what the bytes mean; restarting after abort().
"""

from __future__ import annotations

from collections import deque
from typing import Self

from glmserve.ipc.errors import Aborted, MessageTooLarge
from glmserve.ipc.futex import (
    STRIDE,
    WaitWord,
    advance,
    deadline_after,
    distance,
    is_aborted,
)
from glmserve.ipc.shm import SharedMemory

_HEADER = 8  # bytes of the length in front of a message; frames start at multiples of it
_META = STRIDE  # words[0..1] of the first line: readers, capacity; wait words follow
_WRITER = -1


def _frame_bytes(size: int) -> int:
    return _HEADER + -(-size // _HEADER) * _HEADER


class BroadcastRing:
    """One end of a ring; use `create`, `attach_writer` or `attach_reader`.

    An end belongs to one thread at a time; abort() may be called from any thread of any process
    that holds an end.
    """

    def __init__(self, memory: SharedMemory, reader: int) -> None:
        self._memory = memory
        readers, self.capacity = memory.words[0], memory.words[1]
        assert reader < readers, f"ring has {readers} readers, asked for number {reader}"
        start = _META + (1 + readers) * STRIDE
        self._frames = memory.buffer[start : start + self.capacity]
        self._sent = WaitWord(memory, 1)
        self._taken = [WaitWord(memory, 2 + i) for i in range(readers)]
        self._reader = reader
        self._seen = 0  # value of `sent` up to which this end has sent or received
        self._position = 0  # next frame, in bytes since the start of the stream
        # Writer only: message counts and ends of the frames that some reader may still need.
        self._pending: deque[tuple[int, int]] = deque()
        self._freed = 0

    @classmethod
    def create(
        cls, readers: int, capacity: int, name: str = "ring", reader: int | None = None
    ) -> Self:
        """Makes a ring of `capacity` bytes; returns the writer's end, or that of `reader`."""
        assert readers >= 1, readers
        assert _HEADER < capacity < 1 << 32, capacity
        capacity = -(-capacity // _HEADER) * _HEADER
        memory = SharedMemory.create(_META + (1 + readers) * STRIDE + capacity, name)
        memory.words[0], memory.words[1] = readers, capacity
        return cls(memory, _WRITER if reader is None else reader)

    @classmethod
    def attach_writer(cls, fd: int) -> Self:
        """Opens the writer's end of a ring whose descriptor was inherited."""
        return cls(SharedMemory.attach(fd), _WRITER)

    @classmethod
    def attach_reader(cls, fd: int, reader: int) -> Self:
        """Opens the end of reader number `reader` (0-based); it starts at the first message."""
        return cls(SharedMemory.attach(fd), reader)

    @property
    def fd(self) -> int:
        return self._memory.fd

    @property
    def max_message(self) -> int:
        """Bytes of the longest message that fits."""
        return self.capacity - _HEADER

    def send(self, data: bytes | bytearray | memoryview, timeout: float | None = None) -> None:
        """Appends a message for every reader; waits up to `timeout` seconds for space.

        Raises MessageTooLarge (nothing sent), TimeoutError (nothing sent) or Aborted.
        """
        assert self._reader == _WRITER, "only the writer sends"
        view = memoryview(data).cast("B")
        size = len(view)
        if size > self.max_message:
            raise MessageTooLarge(
                f"message of {size} bytes, but the ring takes at most {self.max_message}"
            )
        if is_aborted(self._sent.load()):
            raise Aborted("a peer ended the exchange")
        end = self._position + _frame_bytes(size)
        self._wait_for_space(end, deadline_after(timeout))
        self._store(self._position, memoryview(size.to_bytes(_HEADER, "little")))
        self._store(self._position + _HEADER, view)
        self._position = end
        self._seen = advance(self._seen)
        self._pending.append((self._seen, end))
        self._sent.add(1)

    def recv(self, timeout: float | None = None) -> bytes:
        """Returns the next message; 0 polls. Raises TimeoutError or Aborted."""
        assert self._reader != _WRITER, "only readers receive"
        self._sent.wait_change(self._seen, deadline_after(timeout))
        size = int.from_bytes(self._load(self._position, _HEADER), "little")
        data = self._load(self._position + _HEADER, size)
        self._position += _frame_bytes(size)
        self._seen = advance(self._seen)
        self._taken[self._reader].add(1)
        return data

    def abort(self) -> None:
        """Makes every send and recv on every end of this ring, now and later, raise Aborted."""
        for word in (self._sent, *self._taken):
            word.abort()

    def close(self) -> None:
        """Unmaps this end. Does not tell the others: send a last message, or abort()."""
        self._frames.release()
        self._memory.close()

    def _wait_for_space(self, end: int, deadline: float | None) -> None:
        """Waits until the frame that ends at `end` overwrites nothing that is still needed."""
        while end - self._freed > self.capacity:
            count, frame_end = self._pending[0]
            for word in self._taken:
                value = word.load()
                # A reader that has not taken this message lags by 1 to len(pending) messages;
                # one that is ahead of it shows a distance close to 2^31.
                while is_aborted(value) or 0 < distance(value, count) <= len(self._pending):
                    value = word.wait_change(value, deadline)
            self._pending.popleft()
            self._freed = frame_end

    def _store(self, position: int, data: memoryview) -> None:
        start = position % self.capacity
        head = min(len(data), self.capacity - start)
        self._frames[start : start + head] = data[:head]
        if head < len(data):
            self._frames[: len(data) - head] = data[head:]

    def _load(self, position: int, size: int) -> bytes:
        start = position % self.capacity
        head = min(size, self.capacity - start)
        data = bytes(self._frames[start : start + head])
        return data if head == size else data + bytes(self._frames[: size - head])
