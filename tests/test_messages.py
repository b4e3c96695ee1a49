# SPDX-License-Identifier: Apache-2.0
"""What every step sends is the same behind a process border."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from glmserve.messages import (
    Ended,
    PageGrant,
    RowReport,
    Started,
    StepResult,
    Update,
    decode,
    encode,
)

ROWS, COUNTS, TOKENS = (np.array(x, dtype=np.int32) for x in ([3, 1], [1, 2], [7, 8, 9]))
REPORTS = {3: RowReport(drafts=(4, 5))}


@pytest.mark.parametrize(
    "sent",
    [
        PageGrant(2, 1, ROWS),
        StepResult(
            5,
            ROWS,
            COUNTS,
            TOKENS,
            np.array([0, 2], np.uint8),
            REPORTS,
            9,
            True,
            np.eye(2, dtype=int),
        ),
        StepResult(6),
        Update(
            (Started(3, "a", 4, 0, 0.1),), ROWS, COUNTS, TOKENS, REPORTS, (Ended("a", "stop", 4),)
        ),
        Update(),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_arrives_as_it_was_sent(sent: Any) -> None:
    got = decode(encode(sent))
    for field in dataclasses.fields(sent):
        before, after = getattr(sent, field.name), getattr(got, field.name)
        if isinstance(before, np.ndarray):
            assert after.dtype == before.dtype
            before, after = before.tolist(), after.tolist()
        assert after == before, field.name
