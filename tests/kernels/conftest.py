# SPDX-License-Identifier: Apache-2.0
"""Kernel tests run on the GPU where there is one, and in Triton's interpreter elsewhere.

Both run the same tests on the same named odd shapes; real shapes are checked by bench/kernels.py.
Kernels under test are called directly, because operators dispatch CPU tensors to the reference.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

GPU = any(path.name[6:].isdigit() for path in Path("/dev").glob("nvidia[0-9]*"))
if not GPU:
    # Triton reads it when it is imported, and torch imports Triton only when it compiles.
    assert "triton" not in sys.modules, "Triton was imported before the interpreter was chosen"
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if GPU else "cpu")


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(20)
