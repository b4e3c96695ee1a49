# SPDX-License-Identifier: Apache-2.0
"""Finds the processes below one of ours, and ends those that outlive it.

A process is remembered by pid and start time, so a pid that the system gave to somebody else
meanwhile is never signalled.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """A process as it was seen; its pid may have another owner later."""

    pid: int
    started: int  # clock ticks since boot

    def alive(self) -> bool:
        """False once it is gone or has been replaced; a zombie is gone."""
        found = _stat(self.pid)
        return found is not None and found[2] == self.started and found[0] != "Z"


def descendants(pid: int) -> list[Process]:
    """Every process below `pid` at this moment (not itself)."""
    parents: dict[int, list[Process]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (found := _stat(int(entry.name))) is not None:
            process = Process(int(entry.name), found[2])
            parents.setdefault(found[1], []).append(process)
    below: list[Process] = []
    queue = [pid]
    while queue:
        children = parents.get(queue.pop(), [])
        below += children
        queue += [child.pid for child in children]
    return below


def end_processes(processes: Sequence[Process], grace: float) -> None:
    """Waits `grace` seconds for them to end by themselves, then kills the rest."""
    if not _wait(processes, grace):
        for process in processes:
            if process.alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        _wait(processes, 2.0)


def _wait(processes: Sequence[Process], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while any(process.alive() for process in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _stat(pid: int) -> tuple[str, int, int] | None:
    """(state, parent pid, start time) of a process, None when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    return fields[0], int(fields[1]), int(fields[19])
