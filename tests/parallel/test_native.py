# SPDX-License-Identifier: Apache-2.0
"""Compiling the CPU collectives."""

from __future__ import annotations

import os

import pytest

from glmserve.errors import EngineError
from glmserve.parallel.native import library_fd


def test_a_process_compiles_once_and_keeps_no_file() -> None:
    fd = library_fd()
    assert library_fd() == fd
    assert os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:")


def test_a_missing_compiler_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(EngineError, match=r"C compiler.*'gloo' does not"):
        library_fd.__wrapped__()
