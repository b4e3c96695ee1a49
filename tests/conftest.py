# SPDX-License-Identifier: Apache-2.0
"""What every test shares: the child environment, the GPU mark, and who shares an xdist worker.

Fixtures of one room live in that room's own conftest; numeric tolerances in tests/tolerances.py.
"""

from __future__ import annotations

import os
from pathlib import Path

from glmserve import env

# Before any test imports torch: it reads the thread count once, when it loads.
os.environ.update(env.child_environment())

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Rooms whose tests start several busy processes. They run one after the other on one worker, so
# that two cores are never shared by two process groups; everything else fills the other worker.
_PROCESS_ROOMS = {"server", "parallel", "runtime"}


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository root."""
    return ROOT


def _has_gpu() -> bool:
    return any(path.name[6:].isdigit() for path in Path("/dev").glob("nvidia[0-9]*"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    no_gpu = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        room = item.path.relative_to(ROOT / "tests").parts[0]
        if room in _PROCESS_ROOMS or item.get_closest_marker("processes"):
            item.add_marker(pytest.mark.xdist_group("processes"))
        if item.get_closest_marker("gpu") and not _has_gpu():
            item.add_marker(no_gpu)
