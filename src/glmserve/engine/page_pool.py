# SPDX-License-Identifier: Apache-2.0
"""The pool of physical cache pages: who holds which, and how many are free.

A page number means the same on every rank and in every cache (main latent, index K, MTP): the
pool hands out numbers, the ranks own the memory. The last physical page is never handed out: it
takes the writes of padding rows.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np

from glmserve.messages import IntArray


class PagePool:
    """Free list over pages 0 .. num_pages - 2. Not thread safe: the engine loop owns it."""

    def __init__(self, num_pages: int, order_seed: int | None = None) -> None:
        self.capacity = num_pages - 1
        self._free = list(range(self.capacity - 1, -1, -1))  # popped from the end: 0 first
        if order_seed is not None:
            random.Random(order_seed).shuffle(self._free)
        self._is_free = [True] * self.capacity

    @property
    def free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> IntArray | None:
        """Returns `count` page numbers, or None (and takes nothing) when fewer are free."""
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._is_free[page] = False
        return np.asarray(pages, dtype=np.int32)

    def release(self, pages: Iterable[int]) -> None:
        for page in pages:
            assert not self._is_free[page], f"page {page} freed twice"
            self._is_free[page] = True
            self._free.append(page)

    def check_integrity(self, held: Iterable[int]) -> None:
        """Asserts that `held` and the free list together are every page, each once."""
        held = list(held)
        assert len(set(self._free)) == len(self._free), "a page is twice in the free list"
        assert len(set(held)) == len(held), "a page has two holders"
        everything = set(self._free) | set(held)
        assert len(self._free) + len(held) == self.capacity == len(everything), (
            f"{self.capacity} pages, {len(self._free)} free, {len(held)} held"
        )
