# SPDX-License-Identifier: Apache-2.0
"""Preparing the wheel's tritonserver: once, by two at once, and with errors that help."""

from __future__ import annotations

import os
import subprocess
import threading
from importlib import metadata
from pathlib import Path

import pytest

from glmserve.server import binaries
from glmserve.server.binaries import BinariesError, ServerBinaries, prepare


def test_the_prepared_server_runs(tmp_path: Path) -> None:
    prepared = prepare(tmp_path)
    done = subprocess.run(
        [prepared.executable, "--help"],
        env=prepared.environment(dict(os.environ)),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "--model-repository" in done.stdout + done.stderr


def test_a_second_call_makes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare(tmp_path)

    def build(*_: object) -> None:
        raise AssertionError("the tree is made again")

    monkeypatch.setattr(binaries, "_build_tree", build)
    assert prepare(tmp_path) == first


def test_two_at_once_leave_one_tree(tmp_path: Path) -> None:
    results: list[ServerBinaries] = []
    threads = [threading.Thread(target=lambda: results.append(prepare(tmp_path))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(results) == 4
    assert len(set(results)) == 1
    assert len(list(tmp_path.iterdir())) == 1


def test_numpy_2_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version
    monkeypatch.setattr(
        binaries.metadata, "version", lambda name: "2.4.0" if name == "numpy" else real(name)
    )
    with pytest.raises(BinariesError, match=r"numpy 2\.4\.0 .*numpy<2"):
        prepare(tmp_path)


def test_a_missing_wheel_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binaries, "_WHEEL", "nvidia-pytriton-that-is-not-there")
    with pytest.raises(BinariesError, match="is not installed"):
        prepare(tmp_path)


def test_a_missing_library_is_named_and_leaves_no_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stub whose libpython cannot be found, as with a Python without a shared library."""
    copy = binaries._copy_executable

    def copy_with_another_libpython(source: Path, target: Path) -> None:
        copy(source, target)
        code = target.read_bytes()
        target.write_bytes(code.replace(b"libpython3.", b"libpython9."))

    monkeypatch.setattr(binaries, "_copy_executable", copy_with_another_libpython)
    with pytest.raises(BinariesError, match=r"libpython9\..*not found.*shared library"):
        prepare(tmp_path)
    assert list(tmp_path.iterdir()) == []
