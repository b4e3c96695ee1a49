# SPDX-License-Identifier: Apache-2.0
"""Imbalance and shares from reported totals."""

from __future__ import annotations

import numpy as np

from glmserve.engine.expert_balance import ExpertBalance


def test_imbalance_is_that_of_the_time_between_two_reports() -> None:
    balance = ExpertBalance(2, "ep")
    balance.take(np.array([[10, 0, 0, 0], [1, 1, 1, 1]]))
    # Layer 0: 10 against a mean of 2.5 an expert, of 5 a rank; layer 1 is even.
    assert (balance.over_experts, balance.over_ranks) == (2.5, 1.5)
    assert balance.by_rank == (12, 2)
    balance.take(np.array([[11, 1, 3, 3], [1, 1, 1, 1]]))
    # Layer 0 grew by 1, 1, 3, 3; layer 1 not at all.
    assert (balance.over_experts, balance.over_ranks) == (1.5, 1.5)
    assert balance.by_rank == (14, 8)
    balance.take(np.array([[11, 1, 3, 3], [1, 1, 1, 1]]))
    assert balance.over_experts == 1.5  # nothing new is known


def test_slices_of_experts_are_even_over_ranks() -> None:
    balance = ExpertBalance(4, "sliced")
    balance.take(np.array([[6, 0], [1, 1]]))
    assert (balance.over_experts, balance.over_ranks) == (1.5, 1.0)
    assert balance.by_rank == (8, 8, 8, 8)


def test_a_model_without_routed_layers_reports_nothing() -> None:
    balance = ExpertBalance(2, "ep")
    balance.take(np.zeros((0, 8), dtype=np.int64))
    assert (balance.over_experts, balance.by_rank) == (0.0, (0, 0))
