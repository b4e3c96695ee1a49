# SPDX-License-Identifier: Apache-2.0
"""Compiles `shm_group.c` and hands the library out as a memfd. No torch.

A process compiles once (0.2 s); the launcher's ranks load the library from the descriptor that they
inherit: no cache directory that can be stale, unwritable or mounted noexec, no file left behind.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from glmserve.errors import EngineError

_SOURCE = Path(__file__).with_name("shm_group.c")
_COMPILERS = ("cc", "gcc", "clang")
# No -ffast-math: sums keep their order. No fused multiply-add can arise from sums alone.
_FLAGS = ("-std=gnu11", "-O3", "-shared", "-fPIC")


@functools.cache
def library_fd() -> int:
    """Returns the memfd with the shared library, open as long as this process; EngineError."""
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise EngineError(
            "collectives 'shm' need a C compiler (cc, gcc or clang) on PATH; 'gloo' does not"
        )
    with tempfile.TemporaryDirectory(prefix="glmserve-") as directory:
        library = Path(directory) / "shm_group.so"
        result = subprocess.run(
            [compiler, *_FLAGS, "-o", str(library), str(_SOURCE)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if result.returncode != 0:
            raise EngineError(f"{compiler} cannot compile {_SOURCE.name}: {result.stderr}")
        data = library.read_bytes()
    fd = os.memfd_create("glmserve-shm-group", os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    return fd
