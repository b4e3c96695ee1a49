# SPDX-License-Identifier: Apache-2.0
"""Grammar masks on a rank: their parts, their bits on a vocabulary shard, their places."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
import torch

from glmserve.messages import RowInit, StepMasks
from glmserve.runtime.grammar_masks import GrammarMasks

VOCAB = 100  # no multiple of 32
WORDS = 4


def packed(*allowed: set[int]) -> np.ndarray:
    masks = np.zeros((len(allowed), WORDS), dtype=np.uint32)
    for mask, tokens in zip(masks, allowed, strict=True):
        for token in tokens:
            mask[token // 32] |= np.uint32(1 << token % 32)
    return masks


def no_message() -> StepMasks:
    raise AssertionError("nothing is to be fetched")


@pytest.mark.parametrize("ranks", [1, 4])
def test_bits_fall_on_the_drawing_rows_of_their_sequence(ranks: int) -> None:
    allowed = [{0, 31, 32, 63, 99}, {5}, {64, 98}]
    masks = {7: packed(allowed[0], allowed[1]), 2: packed(allowed[2])}
    found = []
    for ids in torch.arange(VOCAB).chunk(ranks):
        grammar = GrammarMasks(ids, no_message)
        shard = torch.zeros(6, len(ids), dtype=torch.float64)
        places = {4: (0, 2), 7: (2, 3), 2: (5, 1)}
        grammar.apply_(shard, places, {row: mask.view(np.int32) for row, mask in masks.items()})
        found.append(shard)
    finite = torch.isfinite(torch.cat(found, dim=1))
    kept = [set(row.nonzero()[:, 0].tolist()) for row in finite]
    everything = set(range(VOCAB))
    # Row 4 has no grammar; row 7 has no mask for its third place, which is never reached.
    assert kept == [everything, everything, allowed[0], allowed[1], everything, allowed[2]]


def test_parts_of_a_step_are_joined_until_the_last() -> None:
    messages = deque(
        [
            StepMasks(3, (1, 2), (packed({1}), packed({2})), more=True),
            StepMasks(3, (5,), (packed({3}, {4}),)),
            StepMasks(4, (1,), (packed({6}),)),
        ]
    )
    grammar = GrammarMasks(torch.arange(VOCAB), messages.popleft)
    found = grammar.receive(3)
    assert {row: len(mask) for row, mask in found.items()} == {1: 1, 2: 1, 5: 2}
    assert grammar.receive(4)[1][0, 0] == 1 << 6
    assert not messages


def test_masks_of_another_step_are_a_broken_protocol() -> None:
    grammar = GrammarMasks(torch.arange(VOCAB), lambda: StepMasks(4, (), ()))
    with pytest.raises(AssertionError):
        grammar.receive(3)


def test_a_row_has_a_grammar_until_its_next_sequence() -> None:
    def init(grammar: bool) -> RowInit:
        return RowInit(1, 0, 0.0, 1.0, 0, 5, (), grammar=grammar)

    masks = GrammarMasks(torch.arange(VOCAB), no_message)
    masks.admit(init(True))
    assert 1 in masks.rows and 0 not in masks.rows
    masks.admit(init(False))
    assert 1 not in masks.rows
