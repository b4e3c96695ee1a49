# SPDX-License-Identifier: Apache-2.0
"""Logit shaping against the settings' definitions, one row at a time, on every shard."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from glmserve.messages import RowInit, Shaping
from glmserve.runtime.logit_shaping import DrawingRows, LogitShaping

VOCAB = 24
CPU = torch.device("cpu")


def by_definition(logits: Tensor, s: Shaping, output: list[int], early: list[int]) -> list[float]:
    """The shaped logits of one row whose output so far is `output`."""
    history = s.prompt.tolist() + output
    shaped = []
    for token, raw in enumerate(logits.tolist()):
        value = raw
        if s.allowed_token_ids is not None and token not in s.allowed_token_ids:
            value = -np.inf
        for word in s.bad_word_ids:
            before = list(word[:-1])
            if word[-1] == token and (not before or history[-len(before) :] == before):
                value = -np.inf
        if token in early:
            value = -np.inf
        value += sum(bias for biased, bias in s.logit_bias if biased == token)
        if token in history:
            factor = s.repetition_penalty
            value = value / factor if value > 0 else value * factor
        value -= s.frequency_penalty * output.count(token)
        value -= s.presence_penalty * (token in output)
        shaped.append(value)
    return shaped


def shaping(**changes: object) -> Shaping:
    values: dict[str, object] = {
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": (),
        "allowed_token_ids": None,
        "bad_word_ids": (),
        "prompt": np.array([1, 2, 3, 3], dtype=np.int32),
        "output": np.array([], dtype=np.int32),
    }
    return Shaping(**values | changes)  # type: ignore[arg-type]


CASES = {
    "presence": shaping(presence_penalty=1.5),
    "frequency": shaping(frequency_penalty=0.7, output=np.array([5, 5, 9], dtype=np.int32)),
    "repetition": shaping(repetition_penalty=1.8),
    "bias": shaping(logit_bias=((4, 3.0), (20, -100.0), (4, 1.0))),
    "allowed": shaping(allowed_token_ids=(0, 5, 23)),
    "bad-words": shaping(bad_word_ids=((7,), (3, 8), (5, 9), (9, 5, 6), (3, 3, 5))),
    "all": shaping(
        presence_penalty=-0.5,
        frequency_penalty=0.3,
        repetition_penalty=0.8,
        logit_bias=((5, 2.0),),
        allowed_token_ids=tuple(range(2, 22)),
        bad_word_ids=((5, 9), (6,)),
        output=np.array([9, 5], dtype=np.int32),
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("width", [VOCAB, 8])
def test_each_setting_means_what_it_says(case: str, width: int) -> None:
    setting = CASES[case]
    ahead = [[], [9], [9, 5]]  # drafts ahead of the three drawing rows
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    stops = torch.tensor([[0, 21, -1]]).repeat(5, 1)
    confirmed = [5, 5]
    parts = []
    for first in range(0, VOCAB, width):
        shard = LogitShaping(4, first, width, CPU)
        for row, settings in ((2, setting), (1, None)):
            shard.admit(RowInit(row, 0, 1.0, 1.0, 0, 10, (0, 21), stops_from=50, shaping=settings))
        assert shard.wanted([1]) and shard.wanted([2]) and not shard.wanted([0, 3])
        # Two confirmed of three drawn, one, none.
        draws = torch.tensor([[*confirmed, 7], [3, 1, 1], [6, 6, 6]])
        shard.confirm(torch.tensor([2, 1, 4]), draws, torch.tensor([2, 1, 0]))
        rows = torch.tensor([2, 2, 2, 1])  # three rows of the shaped sequence, a plain one
        ahead_tensor = torch.tensor([[-1, -1], [9, -1], [9, 5], [-1, -1]])
        positions = torch.tensor([48, 49, 50, 60])
        parts.append(
            shard.shape(
                logits[:, first : first + width],
                DrawingRows(rows, positions, ahead_tensor),
                stops,
                torch.full((5,), 50),
            )
        )
    got = torch.cat(parts, 1)
    for i in range(3):
        output = [*setting.output.tolist(), *confirmed, *ahead[i]]
        early = [0, 21] if positions[i] < 50 else []
        want = by_definition(logits[i], setting, output, early)
        assert got[i].tolist() == pytest.approx(want, abs=1e-6)
    assert torch.equal(got[3], logits[3])


def test_a_row_forgets_its_previous_sequence() -> None:
    shard = LogitShaping(2, 0, VOCAB, CPU)
    shard.admit(RowInit(0, 0, 1.0, 1.0, 0, 10, (), shaping=CASES["all"]))
    shard.confirm(torch.tensor([0]), torch.tensor([[5]]), torch.tensor([1]))
    shard.admit(RowInit(0, 0, 1.0, 1.0, 0, 10, (), shaping=CASES["presence"]))
    logits = torch.zeros(1, VOCAB, dtype=torch.float64)
    rows = DrawingRows(torch.tensor([0]), torch.tensor([9]), torch.empty(1, 0, dtype=torch.int64))
    none = torch.full((1, 1), -1)
    assert torch.equal(shard.shape(logits, rows, none, torch.tensor([0])), logits)
    shard.admit(RowInit(0, 0, 1.0, 1.0, 0, 10, (3,), stops_from=10))  # nothing but min_tokens
    got = shard.shape(logits + 1, rows, torch.tensor([[3]]), torch.tensor([10]))
    assert got[0, 3] == -torch.inf and (got[0] == 1).sum() == VOCAB - 1
    assert shard.wanted([0])
    shard.admit(RowInit(0, 0, 1.0, 1.0, 0, 10, (3,), stops_from=7, prompt_length=7))
    assert not shard.wanted([0])
