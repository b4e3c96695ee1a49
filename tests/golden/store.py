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


_COPIES = (
    _HERE.parent / "checkpoint" / "plain_copies.py",
    _HERE.parents[1] / "src" / "glmserve" / "checkpoint" / "quantiser.py",
)


def golden(preset: str, seed: int, copy: str = "") -> Path:
    """Directory of the golden: checkpoint and golden.npz. Makes it when it is not there yet.

    copy: a format; the directory is then that of the quantised copy, with golden_COPY.npz.
    """
    digest = hashlib.sha256()
    for source in (_HERE / "golden.py", _HERE / "oracle.py", *(_COPIES if copy else ())):
        digest.update(source.read_bytes())
    stem = f"{preset}_{copy}-{seed}" if copy else f"{preset}-{seed}"
    directory = CACHE / f"{stem}-{digest.hexdigest()[:12]}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{stem}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test workers may want the same one
        if not directory.is_dir():
            for stale in CACHE.glob(f"{stem}-*"):
                shutil.rmtree(stale)
            _generate(preset, seed, directory, ["--copy", copy] if copy else [])
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
