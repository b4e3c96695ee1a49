# SPDX-License-Identifier: Apache-2.0
"""What tests of processes need: waiting with a deadline, and seeing whether a pid is gone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> float:
    """Polls `condition`; returns the seconds it took, or fails naming `what`."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, f"not within {seconds} s: {what}"
        time.sleep(0.005)
    return time.monotonic() - start


def gone(pid: int) -> bool:
    """Says whether the process has ended (an orphan may stay a zombie if nobody reaps it)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX"


def environment_of(pid: int) -> dict[str, str]:
    """Returns the environment that the process was started with."""
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def children_of(pid: int) -> set[int]:
    """Returns the pids of the process's living children."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == pid and fields[0] not in "ZX":
            found.add(int(stat.parent.name))
    return found


def mappings_of(pid: int) -> set[str]:
    """Returns the names of what the process has mapped: files, memfds, special regions."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6}


@contextmanager
def no_process_left_behind() -> Iterator[None]:
    """Fails when the block leaves a child process."""
    me = os.getpid()
    children = children_of(me)
    yield
    wait_until(lambda: children_of(me) <= children, 20.0, "every child process has ended")
