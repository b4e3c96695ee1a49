# SPDX-License-Identifier: Apache-2.0
"""The shared-memory group between threads: abort, deadlines, rounding of special values."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch

from glmserve.errors import EngineError
from glmserve.ipc.errors import Aborted
from glmserve.parallel.group import SingleGroup
from glmserve.parallel.ordered_sum import sum_in_rank_order
from glmserve.parallel.segment import GroupSegment
from glmserve.parallel.shm_group import SharedMemoryGroup

T = TypeVar("T")


class Threads:
    """Two ranks as threads over one segment with small slots."""

    def __init__(self, timeout: float) -> None:
        self.segment = GroupSegment.create(2, slot_bytes=4096)
        self.groups = [
            SharedMemoryGroup(GroupSegment.attach(os.dup(self.segment.fd)), rank, timeout)
            for rank in (0, 1)
        ]
        self.pool = ThreadPoolExecutor(2)

    def each(self, work: Callable[[SharedMemoryGroup], T]) -> list[T]:
        futures: list[Future[T]] = [self.pool.submit(work, group) for group in self.groups]
        return [future.result(20) for future in futures]

    def close(self) -> None:
        self.pool.shutdown()
        for end in (*self.groups, self.segment):
            end.close()


@pytest.fixture
def threads() -> Iterator[Threads]:
    made = Threads(timeout=20)
    yield made
    made.close()


def test_abort_ends_a_wait_at_once_and_every_later_one(threads: Threads) -> None:
    waiting = threads.pool.submit(threads.groups[0].all_reduce, torch.ones(3))
    time.sleep(0.05)
    threads.segment.abort()
    with pytest.raises(Aborted):
        waiting.result(20)
    for call in (threads.groups[1].barrier, lambda: threads.groups[0].all_gather(torch.ones(1))):
        with pytest.raises(Aborted):
            call()


def test_a_peer_that_never_comes_is_a_timeout() -> None:
    threads = Threads(timeout=0.1)
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="rank 1"):
        threads.groups[1].barrier()
    assert 0.09 < time.monotonic() - start < 20.0
    threads.close()


def test_bf16_rounds_special_values_as_torch_does(threads: Threads) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    tie = torch.tensor([2.0**-9, -(2.0**-9), 3e38, torch.inf], dtype=torch.bfloat16)
    for other in tie:
        parts = [every, other.expand_as(every).contiguous()]
        want = sum_in_rank_order(parts)
        for got in threads.each(lambda group, parts=parts: group.all_reduce(parts[group.rank])):
            assert torch.equal(got.isnan(), want.isnan())
            exact = ~want.isnan()
            assert torch.equal(got[exact].view(torch.int16), want[exact].view(torch.int16))


def test_a_type_that_has_no_sum_is_refused_before_anybody_waits(threads: Threads) -> None:
    with pytest.raises(EngineError, match=r"torch\.bool cannot be summed"):
        threads.groups[0].all_reduce(torch.ones(3, dtype=torch.bool))
    assert [int(x) for x in threads.each(lambda g: g.all_reduce(torch.tensor(g.rank + 1)))] == [
        3,
        3,
    ]


def test_a_group_of_one_exchanges_nothing() -> None:
    group, x = SingleGroup(), torch.arange(6.0).view(2, 3)
    assert torch.equal(group.all_reduce(x), x)
    assert torch.equal(group.all_gather(x), x[None])
    assert torch.equal(group.broadcast(x, 0), x)
