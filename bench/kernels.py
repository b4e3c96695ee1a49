# SPDX-License-Identifier: Apache-2.0
"""Checks operators against their references and times them on this GPU: `make bench-kernels`.

Times are medians of CUDA-graph replays over inputs that rotate through at least 200 MB (cases named
"warm" excepted). Every case is checked before and after it is timed. Rows are merged into
bench/results/kernels.json by operator and shape, so that operators can be measured separately.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
# No NVLink multicast, whatever a case starts.
os.environ.update(
    NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1", NVSHMEM_DISABLE_NVLS="1"
)

import torch
import triton

from bench.registry import Case, Problem, modules
from glmserve.kernels.pdl import use_pdl

RESULTS = ROOT / "bench" / "results" / "kernels.json"


def timed(problem: Problem, repeats: int) -> float:
    """Median microseconds of one launch, in a graph whose last launch uses input set 0."""
    for i in range(min(problem.sets, 3)):
        problem.launch(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in reversed(range(problem.launches)):
            problem.launch(i % problem.sets)
    for _ in range(2):
        graph.replay()
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(repeats)
    ]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(s.elapsed_time(e) for s, e in events) * 1e3 / problem.launches


def measure(case: Case, repeats: int) -> dict[str, Any]:
    row: dict[str, Any] = {"op": case.operator, "shape": case.shape}
    problem = case.build()
    problem.launch(0)
    torch.cuda.synchronize()
    error = problem.error()
    row["us"] = round(timed(problem, repeats), 2)
    error = max(error, problem.error())
    right = error <= case.tolerance and (problem.exact is None or problem.exact())
    row |= {
        "floor_us": None if case.floor_us is None else round(case.floor_us, 2),
        "peer_us": case.peer_us,
        "target_us": case.target_us,
        "error": float(f"{error:.3g}"),
        "right": right,
        **case.notes,
    }
    return row


def write(path: Path, result: dict[str, Any]) -> None:
    """New rows replace old ones of the same operator and shape and keep their place."""
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    table = {(row["op"], row["shape"]): row for row in old}
    table |= {(row["op"], row["shape"]): row for row in result["rows"]}
    rows = [table[key] for key in sorted(table, key=lambda key: key[0])]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**result, "rows": rows}, indent=1) + "\n")


def shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("operators", nargs="*", help="module names; all by default")
    parser.add_argument("--only", default="", help="cases whose shape contains this")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=500, help="start no case after this")
    parser.add_argument("--no-pdl", action="store_true", help="plain launches, to compare")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--merge", type=Path, help="only take over the rows of another such file")
    arguments = parser.parse_args()
    if arguments.merge:
        write(arguments.output, json.loads(arguments.merge.read_text()))
        return 0
    use_pdl(not arguments.no_pdl)
    started = time.monotonic()
    rows: list[dict[str, Any]] = []
    failed = 0
    date = datetime.datetime.now(datetime.UTC).date().isoformat()

    def attempt(what: str, call: Callable[[], Any]) -> Any:
        nonlocal failed
        try:
            return call()
        except Exception as error:  # one failing case must not lose the others
            failed += 1
            print(f"FAIL {what}: {type(error).__name__}: {str(error)[-400:]}", flush=True)
            traceback.print_exc(limit=-4)
            return None

    for module in modules(arguments.operators or None):
        for case in attempt(module.__name__, lambda m=module: list(m.cases())) or ():
            if arguments.only not in case.shape:
                continue
            if time.monotonic() - started > arguments.seconds:
                print("no time left for", case.operator, case.shape)
                continue
            row = attempt(
                f"{case.operator} {case.shape}", lambda c=case: measure(c, arguments.repeats)
            )
            gc.collect()
            if row is None:
                continue
            rows.append({**row, "date": date})
            failed += not row["right"]
            print(
                f"{row['op']:18} {row['shape']:52} {row['us']:9.2f} us"
                f"  floor {shown(row['floor_us']):>8}"
                f"  peer {shown(row['peer_us']):>8}  target {shown(row['target_us']):>8}"
                f"  error {row['error']:.1e} {'' if row['right'] else 'WRONG'}",
                flush=True,
            )
    result = {
        "card": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "date": date,
        "rows": rows,
    }
    write(arguments.output, result)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
