# SPDX-License-Identifier: Apache-2.0
"""Follows the grammars of running requests and says what each drawing place may be.

One matcher a request. It moves on confirmed tokens only; along a step's drafts it is advanced and
rolled back. It outlives preemption, because it knows tokens and no rows. Whatever goes wrong with
a matcher is kept in `error` for its own request. Making grammars is `text.grammar`'s job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from glmserve.errors import CheckpointError
from glmserve.messages import StepMasks
from glmserve.text.grammar_vocabulary import GRAMMAR_LIMITS, GrammarVocabulary

Mask = npt.NDArray[np.uint32]
_MESSAGE_BYTES = 2 << 20  # of masks; the ring holds several messages
_ALL = np.uint32(0xFFFFFFFF)


class Grammars:
    """Starts the grammars of an engine's requests; the vocabulary is made with the first one."""

    def __init__(
        self,
        make_vocabulary: Callable[[], GrammarVocabulary],
        vocab_size: int,
        on_built: Callable[[], None] = lambda: None,
    ) -> None:
        """`vocab_size`: rows of the model's head, which the masks cover. `on_built` is called on
        another thread whenever a grammar has been built, well or badly."""
        self._make_vocabulary, self._on_built = make_vocabulary, on_built
        self.words = -(-vocab_size // 32)
        # A complex grammar takes up to a second to build: beside the loop, not in it.
        self._builder = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    @cached_property
    def vocabulary(self) -> GrammarVocabulary:
        return self._make_vocabulary()

    def start(self, text: str, after: int | None, stop_ids: Sequence[int]) -> GrammarState:
        """The state of a request's grammar; returns at once, building goes on beside."""
        building = self._builder.submit(self._build, text)
        building.add_done_callback(lambda _: self._on_built())
        return GrammarState(self, building, after, stop_ids)

    def bits(self, tokens: Sequence[int]) -> Mask:
        """A mask of exactly `tokens`."""
        mask = np.zeros(self.words, dtype=np.uint32)
        for token in tokens:
            mask[token >> 5] |= np.uint32(1 << (token & 31))
        return mask

    def _build(self, text: str) -> LLMatcher:
        return LLMatcher(self.vocabulary.tokenizer, text, log_level=0, limits=GRAMMAR_LIMITS)


class GrammarState:
    """One request's place in its grammar."""

    def __init__(
        self,
        grammars: Grammars,
        building: Future[LLMatcher],
        after: int | None,
        stop_ids: Sequence[int],
    ) -> None:
        """`stop_ids`: ids that end the request, eos ids among them."""
        self._grammars, self._building = grammars, building
        self._after, self._stop_ids = after, frozenset(stop_ids)
        self._active = after is None
        self._drafts: tuple[int, ...] = ()
        self.error = ""  # why the request cannot go on

    @property
    def built(self) -> bool:
        """Whether `masks` and `advance` answer at once; until then they would wait."""
        return self._building.done()

    def masks(self, places: int, early: int) -> Mask:
        """[n, words] for the next draw and those after its drafts, `places` of them at most.

        The `early` first ones may not end the request, unless the grammar leaves nothing else.
        n is smaller where the grammar forbids a draft: what lies behind it is never reached.
        """
        try:
            masks = self._along_drafts(self._building.result(), places, early)
        except CheckpointError:  # its message is for the server's log
            self.error = "grammar: this checkpoint has no tokenizer that could be used"
            masks = []
        except (ValueError, RuntimeError) as error:
            self.error = f"the grammar cannot be followed: {error}"
            masks = []
        return np.stack(masks or [np.full(self._grammars.words, _ALL)])

    def advance(self, tokens: Sequence[int], drafts: tuple[int, ...]) -> None:
        """Takes confirmed tokens and the next step's drafts; sets `error` if they do not fit."""
        self._drafts = drafts
        if self.error:
            return
        matcher = self._building.result()
        for token in tokens:
            if token in self._stop_ids:
                return
            if not self._active:
                self._active = token == self._after
            elif not matcher.consume_token(token):
                self.error = "no token satisfies the grammar and the request's other settings"
                return

    def _along_drafts(self, matcher: LLMatcher, places: int, early: int) -> list[Mask]:
        masks: list[Mask] = []
        if matcher.is_error():
            self.error = f"the grammar cannot be followed: {matcher.get_error()}"
            return masks
        active, consumed = self._active, 0
        for place in range(places):
            masks.append(self._mask(matcher, active, place < early))
            if place == len(self._drafts) or place == places - 1:
                break
            draft = self._drafts[place]
            if draft in self._stop_ids or not masks[-1][draft >> 5] >> np.uint32(draft & 31) & 1:
                break
            if not active:
                active = draft == self._after
            elif matcher.consume_token(draft):
                consumed += 1
            else:
                break
        # An end-of-answer id is never consumed: llguidance rolls back too far over it.
        if consumed:
            matcher.rollback(consumed)
        if matcher.is_error():
            self.error = f"the grammar cannot be followed: {matcher.get_error()}"
        return masks

    def _mask(self, matcher: LLMatcher, active: bool, early: bool) -> Mask:
        words = self._grammars.words
        if active:
            found = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint32)
            mask = np.zeros(words, dtype=np.uint32)
            mask[: len(found)] = found[:words]
        else:
            reserved = self._grammars.vocabulary.reserved
            mask = ~self._grammars.bits(reserved)
        if early:
            longer = mask & ~self._grammars.bits(tuple(self._stop_ids))
            return longer if longer.any() else mask
        return mask


def step_masks(
    step: int, asked: Iterable[tuple[int, GrammarState, int, int]]
) -> Iterator[StepMasks]:
    """Messages with the masks of (row, state, places, early), in parts that fit the ring."""
    rows: list[int] = []
    masks: list[Mask] = []
    for row, state, places, early in asked:
        if sum(mask.nbytes for mask in masks) > _MESSAGE_BYTES:
            yield StepMasks(step, tuple(rows), tuple(masks), more=True)
            rows, masks = [], []
        rows.append(row)
        masks.append(state.masks(places, early))
    yield StepMasks(step, tuple(rows), tuple(masks))
