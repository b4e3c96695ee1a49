# SPDX-License-Identifier: Apache-2.0
"""Wait words in shared memory: a counter that processes add to and sleep on (Linux futex).

Every change of a word is one FUTEX_WAKE_OP call: the kernel adds atomically, with a full memory
barrier, and wakes the sleepers in the same call, so plain Python needs neither atomics nor a
compiled helper. Values count in steps of 2 and wrap at 2^32; bit 0 is the abort flag. Because the
flag lives in the word itself, setting it changes the value that a sleeper compares, and no wake-up
can fall between its check and its sleep (with one abort word beside the counters it could).
Waits here do not spin: eight ranks and the engine may share two cores, where a spinning waiter
takes the core that the peer it waits for needs.
Not its job: mapping the memory (`shm`), or what a counter means (`ring`, the CPU group).
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import time
from typing import Any

from glmserve.ipc.errors import Aborted
from glmserve.ipc.shm import SharedMemory

STRIDE = 64  # bytes between words, a cache line: waiters on one do not slow writers of another
STEP = 2  # one count
_ABORT = 1
_MASK = 0xFFFFFFFF

_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}
_WAKE_OP = 5
_WAIT_BITSET = 9  # absolute CLOCK_MONOTONIC deadline, which is what time.monotonic() reads
_ANY_BIT = _MASK
_ALL = 0x7FFFFFFF
_OP_ADD, _OP_OR, _CMP_EQ = 1, 2, 0

_long = ctypes.c_long
_NUMBER = _SYS_FUTEX.get(platform.machine(), -1)
# x86 keeps loads in order; elsewhere data must not be read ahead of the counter that covers it.
_LOADS_REORDER = platform.machine() != "x86_64"


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", _long), ("nanoseconds", _long))


def _bind(library: ctypes.CDLL) -> Any:
    call: Any = library.syscall
    call.restype = _long
    call.argtypes = [_long] * 4 + [ctypes.c_void_p] * 2 + [_long]
    return call


_sleep = _bind(ctypes.CDLL(None, use_errno=True))  # gives the GIL up while it waits
_wake = _bind(ctypes.PyDLL(None))  # returns at once: giving the GIL up would only cost time


def deadline_after(timeout: float | None) -> float | None:
    """Returns the time.monotonic() value `timeout` seconds from now; None stays None (no limit)."""
    return None if timeout is None else time.monotonic() + timeout


def advance(value: int) -> int:
    """Returns the value that follows `value`."""
    return (value + STEP) & _MASK


def distance(behind: int, ahead: int) -> int:
    """Returns how many steps `ahead` is ahead of `behind`, across the wrap at 2^32."""
    return ((ahead - behind) & _MASK) // STEP


def is_aborted(value: int) -> bool:
    """Says whether a loaded value carries the abort flag."""
    return bool(value & _ABORT)


def _encode(op: int, operand: int, compare: int) -> int:
    return op << 28 | _CMP_EQ << 24 | (operand & 0xFFF) << 12 | (compare & 0xFFF)


class WaitWord:
    """The futex word number `index` of `memory`: 4 bytes at `index * STRIDE`."""

    __slots__ = ("_address", "_slot", "_words")

    def __init__(self, memory: SharedMemory, index: int) -> None:
        if _NUMBER < 0:
            raise OSError(errno.ENOSYS, f"no futex call known on {platform.machine()}")
        self._words = memory.words
        self._slot = index * STRIDE // 4
        self._address = memory.address + index * STRIDE

    def load(self) -> int:
        """Returns the value; data that other processes wrote before they set it is visible."""
        value = self._words[self._slot]
        if _LOADS_REORDER:
            self._change(_encode(_OP_ADD, 0, 1), self._address + 4, 0)
        return value

    def add(self, count: int) -> None:
        """Adds `count` steps (-512..512) and wakes every sleeper."""
        self._change(_encode(_OP_ADD, count * STEP, 1), self._address, _ALL)

    def abort(self) -> None:
        """Makes every wait on this word, now and later, raise Aborted."""
        self._change(_encode(_OP_OR, _ABORT, 0), self._address, _ALL)

    def wait_change(self, seen: int, deadline: float | None) -> int:
        """Sleeps until the value differs from `seen` and returns it.

        Raises Aborted, or TimeoutError at `deadline` (time.monotonic() seconds; None = never).
        """
        value = self.load()
        if value == seen and not value & _ABORT:
            limit = None
            if deadline is not None:
                seconds = max(deadline, 0.0)
                limit = ctypes.byref(_Timespec(int(seconds), int(seconds % 1.0 * 1e9)))
            while value == seen:
                # The value was still `seen` when the kernel put us to sleep, else it returns.
                rc = _sleep(_NUMBER, self._address, _WAIT_BITSET, seen, limit, None, _ANY_BIT)
                if rc != 0:
                    code = ctypes.get_errno()
                    if code == errno.ETIMEDOUT and self.load() == seen:
                        raise TimeoutError("no peer answered before the deadline")
                    if code not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
                        raise OSError(code, os.strerror(code))
                value = self.load()
        if value & _ABORT:
            raise Aborted("a peer ended the exchange")
        return value

    def _change(self, operation: int, wake_address: int, others: int) -> None:
        rc = _wake(_NUMBER, wake_address, _WAKE_OP, _ALL, others, self._address, operation)
        assert rc >= 0, "FUTEX_WAKE_OP failed on mapped memory"
