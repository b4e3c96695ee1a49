# SPDX-License-Identifier: Apache-2.0
"""The pool of physical cache pages, and the prefix cache over them.

A page number means the same on every rank and in every cache (main latent, index K, MTP): the
pool hands out numbers, the ranks own the memory. The last physical page is never handed out: it
takes the writes of padding rows.

A page whose tokens are all confirmed gets the key of its content: a hash of its tokens and of the
page before it, so a key stands for a whole prefix. Such a page is never written again and may
have many holders. Without a holder it stays findable until its memory is needed, the least
recently used first.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable

import numpy as np

from glmserve.config import PAGE_SIZE
from glmserve.messages import IntArray

ROOT = b"glmserve"  # the key "before" the first page
KEY_BYTES = 16


def chain_key(parent: bytes, tokens: IntArray) -> bytes:
    """Key of the page that holds `tokens` [PAGE_SIZE] after the prefix `parent`."""
    assert len(tokens) == PAGE_SIZE
    return hashlib.blake2b(tokens.tobytes(), digest_size=KEY_BYTES, key=parent).digest()


class PagePool:
    """Pages 0 .. num_pages - 2. Not thread safe: the engine loop owns it."""

    def __init__(self, num_pages: int, order_seed: int | None = None) -> None:
        self.capacity = num_pages - 1
        # Popped from the end: 0 first. Arrays, for millions of pages cost the collector nothing.
        self._empty = array("i", range(self.capacity - 1, -1, -1))
        if order_seed is not None:
            random.Random(order_seed).shuffle(self._empty)
        self._holders = np.zeros(self.capacity, dtype=np.int32)
        self._key: dict[int, bytes] = {}  # page -> key, of findable pages
        self._page: dict[bytes, int] = {}  # and back
        self._unheld: OrderedDict[int, None] = OrderedDict()  # findable, oldest first

    @property
    def free(self) -> int:
        """Pages that can be handed out: empty ones and findable ones that nobody holds."""
        return len(self._empty) + len(self._unheld)

    def allocate(self, count: int) -> IntArray | None:
        """Returns `count` pages with one holder each, or None (and takes nothing) for lack."""
        if count > self.free:
            return None
        pages = [self._take() for _ in range(count)]
        return np.asarray(pages, dtype=np.int32)

    def _take(self) -> int:
        if self._empty:
            page = self._empty.pop()
        else:
            page, _ = self._unheld.popitem(last=False)
            del self._page[self._key.pop(page)]
        assert self._holders[page] == 0
        self._holders[page] = 1
        return page

    def match(self, keys: Iterable[bytes]) -> array[int]:
        """Takes hold of the findable pages of `keys`, up to the first that is not there."""
        pages = array("i")
        for key in keys:
            page = self._page.get(key)
            if page is None:
                break
            self._unheld.pop(page, None)
            pages.append(page)
        self._holders[np.array(pages, dtype=np.int32)] += 1  # no page twice: no key is
        return pages

    def publish(self, page: int, key: bytes) -> None:
        """Makes a held page findable. When the same content is findable already, nothing changes:
        the copy stays private to its holder."""
        assert self._holders[page] > 0
        if key not in self._page and page not in self._key:
            self._page[key] = page
            self._key[page] = key

    def release(self, pages: array[int]) -> None:
        """Gives up one hold on each page. Later pages of a prefix are to be evicted first, so
        pass them in order: they become unheld last page first."""
        given = np.array(pages, dtype=np.int32)
        holds = self._holders[given] - 1
        assert (holds >= 0).all(), f"pages {given[holds < 0]} freed twice"
        self._holders[given] = holds
        for page in given[holds == 0][::-1].tolist():
            if page in self._key:
                self._unheld[page] = None
            else:
                self._empty.append(page)

    def check_integrity(self, held: Iterable[int]) -> None:
        """Asserts that the holds in `held` and the free pages are all there is."""
        holds = Counter(held)
        found = {page: int(self._holders[page]) for page in self._holders.nonzero()[0].tolist()}
        assert holds == Counter(found), "holds differ"
        everything = [*self._empty, *self._unheld, *holds]
        assert len(everything) == len(set(everything)) == self.capacity, (
            f"{self.capacity} pages, {len(self._empty)} empty, {len(self._unheld)} cached,"
            f" {len(holds)} held"
        )
        assert {key: page for page, key in self._key.items()} == self._page
        assert all(page in self._key for page in self._unheld)
