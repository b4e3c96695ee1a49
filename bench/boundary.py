# SPDX-License-Identifier: Apache-2.0
"""Checks and times the layer boundary over peers' memory, one process a GPU: `python3
bench/boundary.py [GPUs]`. Results are merged into bench/results/kernels.json (or --output).
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
os.environ.update(
    NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1", NVSHMEM_DISABLE_NVLS="1"
)

import torch
import torch.distributed as dist
import triton

from bench.kernels import RESULTS, write
from glmserve.kernels.boundary import boundary_reference
from glmserve.kernels.boundary.launch import boundary
from glmserve.kernels.residual_norm.launch import residual_norm
from glmserve.parallel.peer_memory import PeerBoundary

WIDTH, EPS = 6144, 1e-5
NCCL_US = {1: 19.1, 6: 18.4, 32: 20.5, 192: 38.6}  # all-reduce alone, two H200s
TARGET_US = {1: 8.0, 6: 8.0, 32: 11.0, 192: 22.0}


def inputs(rank: int, rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(this rank's partial, the common residual); one partial in a hundred is large."""
    mine = torch.Generator("cuda").manual_seed(1000 * seed + rank)
    common = torch.Generator("cuda").manual_seed(seed)
    partial = torch.randn(rows, WIDTH, device="cuda", generator=mine)
    partial[:, ::100] *= 300
    residual = torch.randn(rows, WIDTH, device="cuda", generator=common) * 3
    return partial.bfloat16(), residual.bfloat16()


def check(peers: PeerBoundary, weight: torch.Tensor, rows: int, two_shot: bool, seed: int) -> bool:
    """Equal to the reference on this rank and, bit for bit, on all."""
    rank, size = peers.memory.rank, peers.memory.size
    partial, residual = inputs(rank, rows, seed)
    if seed % 3 == rank:
        torch.cuda._sleep(200_000)  # ranks arrive at different times
    (normed, _), total = boundary(peers.memory, partial, residual, weight, EPS, two_shot=two_shot)
    partials = [inputs(r, rows, seed)[0] for r in range(size)]
    want_normed, want_total = boundary_reference(partials, residual, weight, EPS)
    error = (normed.float() - want_normed.float()).norm() / want_normed.float().norm()
    everyone = [torch.empty_like(normed) for _ in range(size)]
    dist.all_gather(everyone, normed)
    same = all(torch.equal(everyone[0], other) for other in everyone[1:])
    return bool(torch.equal(total, want_total) and error < 2e-3 and same)


def timed(call: Any, launches: int = 50, repeats: int = 20) -> float:
    """Median microseconds of a launch in a graph, the slowest rank's."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            call()
    times = []
    for _ in range(repeats):
        dist.barrier()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / launches)
    slowest = torch.tensor(statistics.median(times), device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return round(float(slowest), 2)


def rank_main(rank: int, size: int, port: int, output: Path) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", rank=rank, world_size=size, device_id=torch.device("cuda", rank)
    )
    peers = PeerBoundary(dist.group.WORLD, 2048, WIDTH)
    weight = torch.randn(WIDTH, device="cuda", generator=torch.Generator("cuda").manual_seed(7))
    weight = weight.bfloat16()
    rows_of = []
    wrong = 0
    for seed in range(120):  # sizes and forms mixed, so that launches follow each other unevenly
        rows = (1, 6, 192, 33, 512, 7, 1500)[seed % 7]
        wrong += not check(peers, weight, rows, two_shot=seed % 2 == 1, seed=seed)
    if rank == 0:
        print(f"{wrong} of 120 mixed launches wrong", flush=True)
    for rows in (1, 6, 32, 192, 512, 2048):
        for two_shot in (False, True):
            if two_shot and rows < 6:
                continue
            partial, residual = inputs(rank, rows, 1)
            right = check(peers, weight, rows, two_shot, seed=900 + rows)
            form = "two-shot" if two_shot else "one-shot"
            us = timed(
                lambda p=partial, r=residual, t=two_shot: boundary(
                    peers.memory, p, r, weight, EPS, two_shot=t
                ),
                20 if rows > 192 else 50,
            )
            rows_of.append(
                {
                    "op": "boundary",
                    "shape": f"{form}, {rows} rows, {size} GPUs",
                    "us": us,
                    "floor_us": round(rows * WIDTH * 2 * (size - 1) / 373e3, 2),
                    "peer_us": NCCL_US.get(rows),
                    "target_us": TARGET_US.get(rows),
                    "right": bool(right and not wrong),
                    "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
                }
            )
            if rank == 0:
                print(rows_of[-1], flush=True)

    partial, residual = inputs(rank, 32, 1)

    def nccl_and_norm() -> None:
        total = partial.clone()
        dist.all_reduce(total)
        residual_norm(total, residual, weight, EPS)

    us = timed(nccl_and_norm)
    if rank == 0:
        print(f"NCCL all-reduce + residual norm, 32 rows: {us} us", flush=True)
        result = {
            "card": torch.cuda.get_device_name(),
            "versions": {"torch": torch.__version__, "triton": triton.__version__},
            "date": rows_of[0]["date"],
            "rows": rows_of,
        }
        write(output, result)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gpus", nargs="?", type=int, default=2)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--port", type=int, default=29517)
    arguments = parser.parse_args()
    torch.multiprocessing.spawn(
        rank_main, (arguments.gpus, arguments.port, arguments.output), nprocs=arguments.gpus
    )


if __name__ == "__main__":
    main()
