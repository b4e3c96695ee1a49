# SPDX-License-Identifier: Apache-2.0
"""Every test module of this room must leave no process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ipc.processes import no_process_left_behind


@pytest.fixture(autouse=True, scope="module")
def _no_process_left_behind() -> Iterator[None]:
    with no_process_left_behind():
        yield
