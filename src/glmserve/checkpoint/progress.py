# SPDX-License-Identifier: Apache-2.0
"""One line about how far a rank's loading is: a bar, GB, GB/s and the time that is left."""

from __future__ import annotations

import time
from collections.abc import Callable

_WIDTH = 24  # characters of the bar
_PERIOD = 0.5  # seconds between two lines


class ProgressBar:
    """Calls `show` with a line at most twice a second, and once more at the end."""

    def __init__(
        self,
        label: str,
        total: int,
        show: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.label, self.total, self.show, self.clock = label, total, show, clock
        self.done = 0
        self.begin = self.last = clock()

    def add(self, count: int) -> None:
        """`count` more bytes are loaded."""
        self.done += count
        now = self.clock()
        if now - self.last >= _PERIOD or self.done == self.total:
            self.last = now
            self.show(self.line(now))

    def line(self, now: float) -> str:
        share = self.done / self.total if self.total else 1.0
        bar = "#" * round(_WIDTH * share)
        speed = self.done / max(now - self.begin, 1e-9)
        left = (self.total - self.done) / speed if speed else float("inf")
        return (
            f"{self.label} [{bar:.<{_WIDTH}}] {self.done / 1e9:.2f} of {self.total / 1e9:.2f} GB "
            f"of weights, {speed / 1e9:.2f} GB/s, {left:.0f} s left"
        )
