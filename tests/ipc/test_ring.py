# SPDX-License-Identifier: Apache-2.0
"""BroadcastRing: order, size, back-pressure and abort, between threads and between processes."""

from __future__ import annotations

import os
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from glmserve import env
from glmserve.ipc.errors import Aborted, MessageTooLarge
from glmserve.ipc.process import Heartbeat, spawn, terminate
from glmserve.ipc.ring import BroadcastRing

ECHO = Path(__file__).with_name("echo_program.py")


def open_ring(readers: int, capacity: int) -> tuple[BroadcastRing, list[BroadcastRing]]:
    writer = BroadcastRing.create(readers, capacity)
    return writer, [BroadcastRing.attach_reader(os.dup(writer.fd), i) for i in range(readers)]


def close(*ends: BroadcastRing) -> None:
    for end in ends:
        end.close()


def test_every_reader_gets_every_message_in_order_whatever_its_length() -> None:
    writer, readers = open_ring(3, 10_000)
    rng = random.Random(5)
    lengths = [0, 1, 7, 8, 9, 4096, 9_992, *(rng.randrange(9_992) for _ in range(300))]
    messages = [rng.randbytes(n) for n in lengths]
    with ThreadPoolExecutor(3) as pool:
        received = [pool.submit(lambda r: [r.recv(60) for _ in messages], r) for r in readers]
        for message in messages:
            writer.send(message, 60)
        for future in received:
            assert future.result(60) == messages
    close(writer, *readers)


def test_a_reader_that_attaches_late_starts_at_the_first_message() -> None:
    writer = BroadcastRing.create(1, 1000)
    writer.send(b"first")
    reader = BroadcastRing.attach_reader(os.dup(writer.fd), 0)
    assert reader.recv(0) == b"first"
    close(writer, reader)


def test_send_waits_for_the_slowest_reader() -> None:
    writer, (fast, slow) = open_ring(2, 1024)
    for i in range(2):
        writer.send(bytes([i]) * 500, 1)
        assert fast.recv(20) == bytes([i]) * 500
    with pytest.raises(TimeoutError):
        writer.send(b"x" * 500, 0.05)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(writer.send, b"y" * 500, 60)
        time.sleep(0.05)
        assert not sending.done()
        assert slow.recv(20) == b"\x00" * 500
        sending.result(20)
    assert [slow.recv(0)[:1] for _ in range(2)] == [b"\x01", b"y"]  # the send that timed out left
    assert fast.recv(0)[:1] == b"y"  # nothing behind
    close(writer, fast, slow)


def test_a_message_beyond_the_capacity_is_refused_and_harms_nothing() -> None:
    writer, (reader,) = open_ring(1, 1024)
    with pytest.raises(MessageTooLarge, match=r"1017 bytes.*at most 1016"):
        writer.send(b"x" * 1017)
    writer.send(b"x" * 1016)
    assert len(reader.recv(0)) == 1016
    close(writer, reader)


def test_an_empty_ring_times_out() -> None:
    writer, (reader,) = open_ring(1, 1024)
    with pytest.raises(TimeoutError):
        reader.recv(0)
    with pytest.raises(TimeoutError):
        reader.recv(0.05)
    close(writer, reader)


def test_message_counts_wrap() -> None:
    writer, (reader,) = open_ring(1, 256)
    before_wrap = 0xFFFFFFFC
    for index in (1, 2):  # the words "sent" and "taken"
        writer._memory.words[index * 16] = before_wrap
    writer._seen = reader._seen = before_wrap
    for i in range(20):
        writer.send(bytes([i]) * 100, 1)
        writer.send(bytes([i]) * 50, 1)
        with pytest.raises(TimeoutError):
            writer.send(b"z" * 100, 0)
        assert reader.recv(0) == bytes([i]) * 100
        assert reader.recv(0) == bytes([i]) * 50
    close(writer, reader)


@pytest.mark.parametrize("aborter", ["writer", "reader"])
def test_abort_from_any_end_fails_all_ends(aborter: str) -> None:
    writer, readers = open_ring(2, 1024)
    writer.send(b"x" * 1000)
    with ThreadPoolExecutor(2) as pool:
        sending = pool.submit(writer.send, b"y" * 1000)  # no space
        readers[0].recv(1)
        receiving = pool.submit(readers[0].recv)  # nothing there
        time.sleep(0.05)
        (writer if aborter == "writer" else readers[1]).abort()
        for waiting in (sending, receiving):
            with pytest.raises(Aborted):
                waiting.result(20)
    for call in (lambda: writer.send(b"z"), readers[0].recv, readers[1].recv):
        with pytest.raises(Aborted):
            call()
    close(writer, *readers)


def test_rings_carry_messages_between_processes() -> None:
    plans = BroadcastRing.create(2, 100_000)
    results = BroadcastRing.create(1, 100_000, reader=0)
    children = []
    for reader in range(2):
        heartbeat = Heartbeat()
        numbers = (plans.fd, reader, results.fd if reader == 0 else -1, heartbeat.child_fd)
        children.append(
            spawn(
                [sys.executable, str(ECHO), *map(str, numbers)],
                name=f"echo {reader}",
                env=env.child_environment(),
                pass_fds=(plans.fd, results.fd),
                heartbeat=heartbeat,
            )
        )
    try:
        for size in (10, 50_000, 99_992, 1):
            message = os.urandom(size)
            plans.send(message, 20)
            assert results.recv(20) == message[::-1]
    finally:
        terminate(children)
    assert [child.wait(0) for child in children] == [0, 0]
    close(plans, results)
