# SPDX-License-Identifier: Apache-2.0
"""Goldens on demand: made once by `golden.py`, kept in tests/.cache by the generator's hash."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
CACHE = _HERE.parent / ".cache" / "golden"
_DEADLINE = 280  # seconds for one golden on a busy machine; alone it takes about 10

_SOURCES = (
    _HERE / "golden.py",
    _HERE / "oracle.py",
    _HERE.parent / "checkpoint" / "plain_copies.py",
    _HERE.parents[1] / "src" / "glmserve" / "checkpoint" / "quantiser.py",
)
# The quantised copy that is made with a golden: half of the time goes into starting transformers.
_COPY = {
    ("tiny", 21): "fp8",
    ("odd", 21): "fp8",
    ("block", 21): "fp8",
    ("tiny", 22): "int4",
    ("tiny", 23): "awq",
    ("block", 25): "int4-g128",
}


def golden(preset: str, seed: int, copy: str = "") -> Path:
    """Directory of the golden: checkpoint and golden.npz. Makes it when it is not there yet.

    copy: a format; the directory is then that of the quantised copy, with golden_COPY.npz.
    """
    made_with = _COPY.get((preset, seed), "")
    assert copy in ("", made_with), (preset, seed, copy)
    digest = hashlib.sha256()
    for source in _SOURCES:
        digest.update(source.read_bytes())
    stem = f"{preset}-{seed}"
    directory = CACHE / f"{stem}-{digest.hexdigest()[:12]}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{stem}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test workers may want the same one
        if not directory.is_dir():
            for stale in CACHE.glob(f"{stem}-*"):
                shutil.rmtree(stale)
            _generate(preset, seed, directory, ["--copy", made_with] if made_with else [])
    return directory / copy


def _generate(preset: str, seed: int, directory: Path, more: list[str]) -> None:
    partial = directory.with_suffix(".partial")
    command = [sys.executable, str(_HERE / "golden.py"), "--preset", preset, "--seed", str(seed)]
    result = subprocess.run(
        [*command, *more, "--out", str(partial)],
        capture_output=True,
        text=True,
        timeout=_DEADLINE,
        check=False,
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    os.replace(partial, directory)
