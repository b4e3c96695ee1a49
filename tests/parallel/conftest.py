# SPDX-License-Identifier: Apache-2.0
"""Every test module of this room must leave no process and no named shared memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ipc.processes import nothing_left_behind


@pytest.fixture(autouse=True, scope="module")
def _nothing_left_behind() -> Iterator[None]:
    with nothing_left_behind():
        yield
