# SPDX-License-Identifier: Apache-2.0
"""Times the groups and the rings between real rank processes: `python bench/collectives.py`.

Prints medians, and the slowest rank's 90th percentile, in microseconds. Every rank is a process of
its own, so with more ranks than cores the numbers contain the switches between them.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from pathlib import Path

from glmserve.config import EngineConfig
from glmserve.parallel import make_group
from glmserve.parallel.launcher import RankLauncher
from glmserve.parallel.rank_spec import RankSpec

ELEMENTS = (64, 1024, 8192, 65536, 524288, 3145728)  # 3145728 = 512 rows of 6144
DTYPES = ("float32", "float64", "bfloat16")


def rank_main() -> None:
    import torch

    spec = RankSpec.from_json(sys.argv[1])
    spec.watch_parent()
    torch.set_num_threads(1)
    group, plans, results = make_group(spec), spec.open_plans(), spec.open_results()
    device = "cuda" if spec.collectives == "nccl" else "cpu"
    while True:
        message = plans.recv()
        if message.startswith(b"echo"):
            if results is not None:
                results.send(b"done")
            continue
        plan = json.loads(message)
        x = torch.ones(plan["elements"], dtype=getattr(torch, plan["dtype"]), device=device)
        call = group.barrier
        if plan["what"] != "barrier":
            call = functools.partial(getattr(group, plan["what"]), x)
        times = []
        for _ in range(plan["repeat"] + 5):
            start = time.perf_counter()
            call()
            if device == "cuda":
                torch.cuda.synchronize()
            times.append((time.perf_counter() - start) * 1e6)
        times = sorted(times[5:])
        row = [statistics.median(times), times[len(times) * 9 // 10]]
        everyone = group.all_gather(torch.tensor(row, device=device)).tolist()
        if results is not None:
            results.send(json.dumps(everyone).encode())


def measure(collectives: str, ranks: int, quick: bool) -> None:
    device = "cuda" if collectives == "nccl" else "cpu"
    config = EngineConfig(
        checkpoint="none", ranks=ranks, device=device, collectives=collectives, dtype="fp32"
    )
    launcher = RankLauncher(config, program=(str(Path(__file__).resolve()), "rank"))
    try:

        def run(what: str, elements: int, dtype: str, repeat: int) -> None:
            plan = {"what": what, "elements": elements, "dtype": dtype, "repeat": repeat}
            launcher.send(json.dumps(plan).encode())
            everyone = json.loads(launcher.recv(300))
            median = statistics.median(row[0] for row in everyone)
            worst = max(row[1] for row in everyone)
            print(
                f"{collectives:5} {ranks} ranks  {what:10} {elements:8} {dtype:9}"
                f" median {median:9.1f} us  p90 {worst:9.1f} us",
                flush=True,
            )

        base = 500 if collectives == "shm" else 30
        run("barrier", 1, "float32", base)
        for elements in ELEMENTS[:3] if quick else ELEMENTS:
            repeat = max(10, min(base, base * 8192 // elements))
            for dtype in DTYPES:
                run("all_reduce", elements, dtype, repeat)
        run("all_gather", 1024, "float32", base)
        for size in (300, 20000):
            times = []
            for _ in range(500):
                start = time.perf_counter()
                launcher.send(b"echo".ljust(size))
                launcher.recv(10)
                times.append((time.perf_counter() - start) * 1e6)
            times.sort()
            print(
                f"rings {ranks} ranks  plan of {size} bytes to all, reply of rank 0"
                f" median {times[250]:9.1f} us  p90 {times[450]:9.1f} us",
                flush=True,
            )
    finally:
        launcher.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--collectives", default="shm,gloo", help="comma list: shm, gloo, nccl")
    parser.add_argument("--ranks", default="2,8", help="comma list of rank counts")
    parser.add_argument("--quick", action="store_true", help="small messages only")
    options = parser.parse_args()
    for collectives in options.collectives.split(","):
        for ranks in options.ranks.split(","):
            measure(collectives, int(ranks), options.quick)


if __name__ == "__main__":
    if len(sys.argv) > 2 and sys.argv[1] == "rank":
        del sys.argv[1]
        rank_main()
    else:
        main()
