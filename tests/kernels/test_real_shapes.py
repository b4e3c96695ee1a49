# SPDX-License-Identifier: Apache-2.0
"""Every case of the timing table against its reference, at GLM's real shapes, on a GPU.

The cases bring permuted pages and slots, outlier rows and scales, and, where an operator promises
it, the comparison of a row's bits alone and in a batch. Times are not looked at here.
"""

from __future__ import annotations

import gc

import pytest

from bench.registry import Case, modules

CASES = [case for module in modules() for case in module.cases()]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.operator}, {c.shape}".replace("::", ":"))
def test_equals_the_reference(case: Case) -> None:
    problem = case.build()
    problem.launch(0)
    error = problem.error()
    right = problem.exact is None or problem.exact()
    del problem
    gc.collect()
    assert error <= case.tolerance
    assert right
