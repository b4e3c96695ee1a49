# SPDX-License-Identifier: Apache-2.0
"""Chooses the K chunks of few-row products on this GPU and writes them out.

    python3 bench/tune_linear.py [OUTPUT.json]   default: kernels/linear/configs.json

Every weight of one rank of TP8 is timed at 1, 6 and 32 rows with each number; the one with the
least sum of times over their best wins, because the chunks must not depend on the rows.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
os.environ.update(
    NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1", NVSHMEM_DISABLE_NVLS="1"
)

import torch

from bench.kernels import timed
from bench.operators.linear import BF16, FP8, HEAD, problem
from glmserve.kernels.linear import launch

ROWS = (1, 6, 32)


def plans(width: int, depth: int) -> list[launch.Plan]:
    blocks, tiles = depth // 128, -(-width // 64)
    return [launch.Plan(c, 128) for c in (1, 2, 3, 4, 6, 8) if blocks % c == 0 and c * tiles <= 400]


def tune(width: int, depth: int, fp8: bool) -> int:
    dtype = torch.float32 if (width, depth) == HEAD else torch.bfloat16
    times: dict[launch.Plan, list[float]] = {}
    original = launch.plan
    for rows in ROWS:
        case = problem(rows, width, depth, fp8, dtype)
        for candidate in plans(width, depth):
            launch.plan = lambda *_, c=candidate: c  # type: ignore[assignment]
            case.launch(0)
            torch.cuda.synchronize()
            assert case.error() < 4e-3, (width, depth, rows, candidate)
            times.setdefault(candidate, []).append(timed(case, 7))
        del case
        torch.cuda.empty_cache()
    launch.plan = original
    best = [min(row[i] for row in times.values()) for i in range(len(ROWS))]
    winner = min(times, key=lambda c: sum(t / b for t, b in zip(times[c], best, strict=True)))
    for candidate, row in sorted(times.items()):
        mark = "<" if candidate == winner else ""
        print(width, depth, candidate, [round(t, 2) for t in row], mark, flush=True)
    return winner.chunks


def main() -> None:
    path = ROOT / "src" / "glmserve" / "kernels" / "linear" / "configs.json"
    if len(sys.argv) > 1:
        path = Path(sys.argv[1])
    chunks = {}
    for kind, shapes in (("fp8", FP8), ("bf16", (*BF16, HEAD))):
        for width, depth in shapes:
            chunks[f"{kind}:{width}x{depth}"] = tune(width, depth, kind == "fp8")
    made = {
        "made_by": "bench/tune_linear.py",
        "card": torch.cuda.get_device_name(),
    }
    path.write_text(json.dumps({**made, "chunks": chunks}, indent=1) + "\n")


if __name__ == "__main__":
    main()
