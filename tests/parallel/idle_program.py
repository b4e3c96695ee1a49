# SPDX-License-Identifier: Apache-2.0
"""A rank without torch: reports that it runs, then does what GLMSERVE_TEST_ROLE says.

"echo": rank 0 sends every plan back. "fail": the last rank cannot start. "deaf": nothing
but SIGKILL ends them.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from glmserve.config import EngineConfig
from glmserve.ipc.errors import Aborted
from glmserve.parallel.rank_spec import RankSpec


def main() -> None:
    spec = RankSpec.from_json(sys.argv[1])
    role = os.environ["GLMSERVE_TEST_ROLE"]
    plans, results = spec.open_plans(), spec.open_results()
    assert EngineConfig.from_json(spec.engine).ranks == spec.size
    if role == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        spec.watch_parent()
    if role == "fail" and spec.rank == spec.size - 1:
        raise SystemExit("tensor lm_head.weight is missing")
    print("torch loaded:", "torch" in sys.modules, flush=True)
    if results is not None:
        results.send(b"ready")
    if role == "deaf":
        time.sleep(600)
    while True:
        plan = plans.recv()
        if results is not None:
            results.send(plan)


if __name__ == "__main__":
    try:
        main()
    except Aborted:
        sys.exit(1)
