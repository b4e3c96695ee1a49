# SPDX-License-Identifier: Apache-2.0
"""Wait words: sleeping, waking, deadlines and abort."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from glmserve.ipc.errors import Aborted
from glmserve.ipc.futex import WaitWord, advance, deadline_after, distance, is_aborted
from glmserve.ipc.shm import SharedMemory


@pytest.fixture
def word():
    memory = SharedMemory.create(4096, "test")
    yield WaitWord(memory, 3)
    memory.close()


def test_add_wakes_a_sleeper_with_the_new_value(word: WaitWord) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(word.wait_change, 0, deadline_after(60))
        time.sleep(0.05)
        assert not waiting.done()
        word.add(3)
        assert waiting.result(20) == 6


def test_a_changed_value_returns_without_sleeping(word: WaitWord) -> None:
    word.add(1)
    assert word.wait_change(0, deadline_after(0)) == 2


def test_the_deadline_ends_the_wait(word: WaitWord) -> None:
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        word.wait_change(0, deadline_after(0.1))
    assert 0.09 < time.monotonic() - start < 20.0


def test_concurrent_adds_are_all_counted(word: WaitWord) -> None:
    threads = [
        threading.Thread(target=lambda: [word.add(1) for _ in range(2000)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert distance(0, word.load()) == 8000


def test_abort_ends_every_wait_now_and_later(word: WaitWord) -> None:
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(word.wait_change, 0, None) for _ in range(3)]
        time.sleep(0.05)
        word.abort()
        for future in waiting:
            with pytest.raises(Aborted):
                future.result(20)
    word.add(1)
    assert is_aborted(word.load())
    for seen in (0, 2, word.load()):
        with pytest.raises(Aborted):
            word.wait_change(seen, None)


def test_values_wrap() -> None:
    assert advance(0xFFFFFFFE) == 0
    assert distance(0xFFFFFFFC, 2) == 3
    assert distance(2, 2) == 0
