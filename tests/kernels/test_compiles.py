# SPDX-License-Identifier: Apache-2.0
"""Every shipped kernel configuration compiles for sm_90, within its limits, as the table says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TABLE = Path("bench") / "results" / "aot.json"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_shipped_configurations_compile_and_the_committed_table_lists_them(
    root: Path, tmp_path: Path
) -> None:
    new = tmp_path / "aot.json"
    # In a process of its own: the interpreter must be off before Triton is imported.
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(root / "bench" / "aot.py"), "--output", str(new)],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=860,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    now, committed = (json.loads(path.read_text()) for path in (new, root / TABLE))
    assert now == committed, "run `make aot` and look at what changed"
