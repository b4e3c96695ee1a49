# SPDX-License-Identifier: Apache-2.0
"""Shapes of steps: buckets, places, and bounds on how far rows have come."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from glmserve.config import EngineConfig
from glmserve.kernels.row_state import columns
from glmserve.messages import PageGrant, PrefillChunk, RowInit, StepPlan
from glmserve.runtime.packing import MIXED_ROWS, Places, Shape, bucket_of, buckets, pack
from glmserve.runtime.reach import Reach
from glmserve.runtime.row_state import RowState

ROWS, DRAFTS = 6, 2


@pytest.fixture
def state() -> RowState:
    """Rows 1 and 4 have prompts of 30 and 70 tokens whose first tokens were drawn."""
    config = EngineConfig("x", num_pages=16, max_rows=ROWS, drafts=DRAFTS, max_model_len=200)
    state = RowState(config, torch.device("cpu"))
    inits = [RowInit(row, row, 0.0, 1.0, 0, 9, (7,)) for row in (1, 4)]
    grants = [PageGrant(row, 1, np.array([3, row], dtype=np.int32)) for row in (1, 4)]
    state.admit(inits, grants)
    for row, length in ((1, 30), (4, 70)):
        state.table[row, 0] = length + 1  # LENGTH
        state.table[row, 1] = 100 + row  # LAST_TOKEN
        state.table[row, 3] = 1  # ACTIVE
        state.table[row, 40:42] = torch.tensor([200, 300]) + row  # DRAFTS
    return state


def test_buckets_hold_every_count_with_little_padding() -> None:
    assert [bucket_of(n) for n in (1, 2, 3, 5, 64, 65, 129, 193)] == [
        1, 2, 4, 8, 64, 128, 192, 256
    ]  # fmt: skip
    assert buckets(100) == [1, 2, 4, 8, 16, 32, 64, 128]
    assert all(bucket_of(n) >= n for n in range(1, 1000))
    assert all(bucket_of(n) in buckets(300) for n in range(1, 301))


def test_page_grants_land_in_their_lines_and_leave_the_others(state: RowState) -> None:
    assert state.page_table.tolist()[1] == [15, 3, 1, 15]
    assert state.page_table.tolist()[4] == [15, 3, 4, 15]
    assert set(state.page_table[ROWS].tolist()) == {15}


def test_decoding_places_come_from_the_state_and_padding_is_a_sequence_of_its_own(
    state: RowState,
) -> None:
    plan = StepPlan(0, decode=(4, 0, 1))  # row 0 is not active
    places = Places.of(plan, DRAFTS, Shape(12, 4, mixed=False))
    layout = pack(plan, places, state, None)
    layout.place(state)
    batch = layout.batch
    assert batch.tokens.tolist() == [104, 204, 304, 0, 0, 0, 101, 201, 301, 0, 0, 0]
    assert batch.positions.tolist() == [70, 71, 72, 0, 1, 2, 30, 31, 32, 0, 1, 2]
    assert batch.row_seq.tolist() == [4] * 3 + [ROWS] * 3 + [1] * 3 + [ROWS] * 3
    assert layout.next_positions.tolist() == [p + 1 for p in batch.positions.tolist()]
    assert layout.ahead[:3].tolist() == [[-1, -1], [204, -1], [204, 304]]
    assert batch.rows_per_sequence == DRAFTS + 1


def test_a_mixed_step_draws_from_decoding_places_and_prompt_ends(state: RowState) -> None:
    going_on = PrefillChunk(2, 0, 3, np.array([5, 6, 7, 8], dtype=np.int32))
    ends = PrefillChunk(3, 10, 2, np.array([50, 51], dtype=np.int32))
    plan = StepPlan(0, prefill=(going_on, ends), decode=(4, 1, 0))
    places = Places.of(plan, DRAFTS, None)
    layout = pack(plan, places, state, None)
    layout.place(state)
    assert len(layout.batch.tokens) == 3 * 3 + 5
    assert layout.batch.tokens[9:].tolist() == [5, 6, 7, 50, 51]
    assert layout.batch.positions[9:].tolist() == [0, 1, 2, 10, 11]
    assert layout.following[9:13].tolist() == [6, 7, 8, 51]
    assert layout.rows.tolist() == [4, 1, 0, 3]
    assert layout.sequences[:, columns.PROMPT_END].tolist() == [-1, -1, -1, 12]
    assert layout.sequences[:, columns.FIRST_ROW].tolist() == [0, 3, 6, 13]
    assert layout.sequences[:, columns.FIRST_DRAW].tolist() == [0, 3, 6, 9]
    assert layout.drawn(layout.batch.positions).tolist()[-1] == 11
    assert places.by_row() == {4: (0, 3), 1: (3, 3), 0: (6, 3), 3: (9, 1)}
    assert layout.ahead[-1].tolist() == [-1, -1]


def test_a_padded_mixed_step_has_the_same_rows_and_draws_from_all(state: RowState) -> None:
    ends = PrefillChunk(3, 10, 2, np.array([50, 51], dtype=np.int32))
    plan = StepPlan(0, prefill=(ends,), decode=(4,))
    places = Places.of(plan, DRAFTS, Shape(16, 5, mixed=True))
    layout = pack(plan, places, state, None)
    layout.place(state)
    assert layout.drawing is None and layout.ahead.shape == (16, DRAFTS)
    assert layout.batch.tokens.tolist() == [104, 204, 304, 50, 51] + [0] * 11
    assert layout.batch.row_seq.tolist() == [4, 4, 4, 3, 3] + [ROWS] * 11
    assert layout.sequences.tolist() == [[4, 0, 0, -1], [3, 4, 4, 12]] + [[ROWS, -1, 0, -1]] * 3
    assert places.by_row() == {4: (0, 3), 3: (4, 1)}


def test_bounds_follow_what_is_planned_and_what_is_confirmed() -> None:
    reach = Reach(ROWS)
    prompt = PrefillChunk(2, 64, 6, np.zeros(6, dtype=np.int32))

    def seen(plan: StepPlan) -> int:
        return reach.plan(plan, Places.of(plan, DRAFTS, None))

    decode = StepPlan(1, decode=(2,))
    assert seen(StepPlan(0, prefill=(prompt,))) == 70
    assert seen(decode) == 71 + DRAFTS
    assert seen(decode) == 74 + DRAFTS
    reach.confirm(np.array([2]), np.array([2]))  # one token was confirmed
    assert seen(decode) == 75 + DRAFTS


@pytest.mark.parametrize("extra", [0, 1])
def test_only_chunks_that_no_captured_step_holds_attend_densely(
    state: RowState, extra: int
) -> None:
    length = MIXED_ROWS[-1] + extra
    chunk = PrefillChunk(1, 0, length, np.zeros(length, dtype=np.int32))
    plan = StepPlan(0, prefill=(chunk,), decode=(4,))  # too many rows for any captured step
    dense = pack(plan, Places.of(plan, DRAFTS, None), state, None).batch.dense
    assert [rows.rows for rows in dense] == [length] * extra
