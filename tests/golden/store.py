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


def golden(preset: str, seed: int) -> Path:
    """Directory of the golden: checkpoint and golden.npz. Makes it when it is not there yet."""
    digest = hashlib.sha256()
    for source in ("golden.py", "oracle.py"):
        digest.update((_HERE / source).read_bytes())
    directory = CACHE / f"{preset}-{seed}-{digest.hexdigest()[:12]}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{preset}-{seed}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test workers may want the same one
        if not directory.is_dir():
            for stale in CACHE.glob(f"{preset}-{seed}-*"):
                shutil.rmtree(stale)
            _generate(preset, seed, directory)
    return directory


def _generate(preset: str, seed: int, directory: Path) -> None:
    partial = directory.with_suffix(".partial")
    command = [sys.executable, str(_HERE / "golden.py"), "--preset", preset, "--seed", str(seed)]
    result = subprocess.run(
        [*command, "--out", str(partial)],
        capture_output=True,
        text=True,
        timeout=_DEADLINE,
        check=False,
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    os.replace(partial, directory)
