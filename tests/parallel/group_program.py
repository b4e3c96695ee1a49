# SPDX-License-Identifier: Apache-2.0
"""A rank of the group tests: does what the plans say and reports what every rank ended up with."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from typing import Any

import torch
from torch import Tensor

from glmserve.parallel import make_group
from glmserve.parallel.group import Group
from glmserve.parallel.rank_spec import RankSpec


def rank_input(rank: int, shape: list[int], dtype: str) -> Tensor:
    """The tensor that rank `rank` contributes: reproducible in the test process."""
    generator = torch.Generator().manual_seed(1000 * rank + len(shape))
    kind = getattr(torch, dtype)
    if kind.is_floating_point:
        # Magnitudes far apart: another order of the sum gives other bits.
        wide = torch.randn(shape, generator=generator, dtype=torch.float64)
        return (wide * 10.0 ** (3 * (rank % 3))).to(kind)
    limit = torch.iinfo(kind).max if kind.is_signed else 200
    return torch.randint(-limit if kind.is_signed else 0, limit, shape, generator=generator).to(
        kind
    )


def digest(x: Tensor) -> str:
    """Hash of shape, dtype and every bit."""
    data = x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(repr((tuple(x.shape), x.dtype)).encode() + data).hexdigest()


def run(group: Group, device: str, plan: dict[str, Any]) -> str:
    x = rank_input(group.rank, plan["shape"], plan["dtype"]).to(device)
    if plan.get("transposed"):
        x = x.t()
    before = digest(x)
    if plan.get("stagger"):
        time.sleep(0.002 * ((group.rank * 5 + plan["stagger"]) % 7))
    match plan["do"]:
        case "all_reduce":
            result = group.all_reduce(x)
        case "all_gather":
            result = group.all_gather(x)
        case "broadcast":
            result = group.broadcast(x, plan["src"])
        case "block":
            if group.rank == group.size - 1:
                time.sleep(600)
            result = group.all_reduce(x)
        case other:
            raise AssertionError(other)
    assert digest(x) == before, "the input was changed"
    return digest(result)


def main() -> None:
    spec = RankSpec.from_json(sys.argv[1])
    spec.watch_parent()
    torch.set_num_threads(1)
    plans, results = spec.open_plans(), spec.open_results()
    group = make_group(spec)
    device = "cuda:0" if spec.collectives == "nccl" else "cpu"
    while True:
        plan_list = json.loads(plans.recv())
        mine = "".join(run(group, device, plan) for plan in plan_list).encode()
        everyone = group.all_gather(torch.tensor(list(mine), dtype=torch.uint8, device=device))
        if results is not None:
            rows = [bytes(row.tolist()).decode() for row in everyone]
            split = [[row[i : i + 64] for i in range(0, len(row), 64)] for row in rows]
            results.send(json.dumps(split).encode())


if __name__ == "__main__":
    main()
