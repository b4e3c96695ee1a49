# SPDX-License-Identifier: Apache-2.0
"""Who waits, who runs, and which row and pages each of them holds; every change of that.

Planning and results both work on it. Not its job: who should run (`planning`), what the ranks
said (`results`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from glmserve.config import PAGE_SIZE, EngineConfig
from glmserve.engine.page_pool import PagePool
from glmserve.engine.row_table import RowTable
from glmserve.engine.sequence import Sequence
from glmserve.messages import IntArray, Started


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order


class Roster:
    """Every sequence from arrival to its end."""

    def __init__(self, config: EngineConfig) -> None:
        self.max_rows = config.max_rows
        self.pool = PagePool(config.num_pages, config.page_seed)
        self.table = RowTable(config.max_rows)
        self.waiting: list[Sequence] = []  # both in order: (priority, arrival)
        self.running: list[Sequence] = []  # preemption takes from the end
        self.by_uid: dict[str, Sequence] = {}  # those that have not ended
        self.by_row: dict[int, Sequence] = {}
        self.started: list[Started] = []  # not told to the client yet
        self.preemptions = 0
        self.next_step = 0
        self.done_step = -1  # newest step whose result has arrived
        self._leaving: list[Sequence] = []  # ended, but a step in flight still names their row
        self._free_rows = list(range(config.max_rows - 1, -1, -1))

    @property
    def idle(self) -> bool:
        return not self.by_uid and not self._leaving

    @property
    def busy(self) -> bool:
        """A step is in flight."""
        return self.done_step != self.next_step - 1

    @property
    def has_free_row(self) -> bool:
        return bool(self._free_rows)

    def add(self, sequence: Sequence) -> None:
        self.by_uid[sequence.uid] = sequence
        insort(self.waiting, sequence, key=_order)

    def candidates(self) -> Iterator[Sequence]:
        """Waiting sequences that could take a row now, in order; read it before moving any."""
        return (sequence for sequence in self.waiting if sequence.ready)

    def from_on(self, sequence: Sequence) -> list[Sequence]:
        """A running sequence and those that are behind it."""
        return self.running[bisect_left(self.running, sequence.order, key=_order) :]

    def enter(self, sequence: Sequence) -> None:
        """Gives a waiting sequence a row; pages that it holds already stay."""
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=_order)
        row = sequence.row = self._free_rows.pop()
        self.by_row[row] = sequence
        table = self.table
        table.live[row], table.decoding[row] = True, False
        table.grammar[row] = sequence.grammar is not None
        table.length[row], table.limit[row] = len(sequence.context), sequence.limit
        table.in_flight[row], table.last_step[row] = 0, -1
        table.slots[row] = len(sequence.pages) * PAGE_SIZE
        table.page_end[row] = (sequence.published + 1) * PAGE_SIZE
        self.started.append(
            Started(row, sequence.uid, sequence.prompt_length, sequence.cached, sequence.queued)
        )

    def grow(self, sequence: Sequence, pages: IntArray) -> None:
        """Appends pages that the pool has given to the sequence."""
        sequence.pages.frombytes(pages.tobytes())
        if sequence.row >= 0:
            self.table.slots[sequence.row] = len(sequence.pages) * PAGE_SIZE

    def settle(self, sequence: Sequence) -> None:
        """Brings the output of a running sequence up to date."""
        start = sequence.prompt_length + len(sequence.output)
        sequence.output.frombytes(self.table.tokens(sequence.row, start).tobytes())

    def publish(self, sequence: Sequence, computed: int) -> None:
        """Lets others find the pages that `computed` confirmed tokens have filled.

        Slot j of the MTP caches is made from token j and what lies before it, so a page's key
        covers it too (DESIGN §3.3).
        """
        full = computed // PAGE_SIZE
        if full <= sequence.published:
            return
        if full * PAGE_SIZE > len(sequence.context):
            self.settle(sequence)
        keys = sequence.page_keys(sequence.published, full)
        for page, key in enumerate(keys, sequence.published):
            self.pool.publish(sequence.pages[page], key)
        sequence.published = full
        self.table.page_end[sequence.row] = (full + 1) * PAGE_SIZE

    def preempt(self, sequence: Sequence) -> None:
        """Takes row and pages back; the sequence is computed again when there is room."""
        assert not self.busy, "only settled sequences know what to compute again"
        self.preemptions += 1
        self.running.remove(sequence)
        self.settle(sequence)
        self._release(sequence)
        sequence.restart()
        insort(self.waiting, sequence, key=_order)

    def end(self, sequence: Sequence) -> None:
        """The sequence has ended; row and pages are free when no step in flight names it."""
        del self.by_uid[sequence.uid]
        self.started = [started for started in self.started if started.uid != sequence.uid]
        if sequence.row < 0:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        self.table.live[sequence.row] = self.table.decoding[sequence.row] = False
        self._leaving.append(sequence)
        self.release_ended()

    def release_ended(self) -> None:
        """Frees what ended sequences hold, where the newest result allows it."""
        staying = []
        for sequence in self._leaving:
            if self.table.last_step[sequence.row] <= self.done_step:
                self._release(sequence)
            else:
                staying.append(sequence)
        self._leaving = staying

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.pages)
        self.table.live[sequence.row] = self.table.decoding[sequence.row] = False
        self._free_rows.append(sequence.row)
        del self.by_row[sequence.row]
        sequence.row = -1
        sequence.forget_pages()

    def check_integrity(self) -> None:
        """Asserts that pages and rows are accounted for; cheap enough to run whenever idle."""
        self.pool.check_integrity(p for s in self.by_row.values() for p in s.pages)
        assert sorted([*self._free_rows, *self.by_row]) == list(range(self.max_rows))
        assert self.table.live.nonzero()[0].tolist() == sorted(s.row for s in self.running)
