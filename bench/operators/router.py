# SPDX-License-Identifier: Apache-2.0
"""The router at GLM's size: 256 experts, 8 a row, biases near 34."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from bench.registry import Case, Problem, memory_us
from glmserve.kernels.router import ChoiceCount, reference
from glmserve.kernels.router.launch import route, route_sorted

EXPERTS, WIDTH, TOP_K, SCALE = 256, 6144, 8, 2.5


def count_of(rows: int, device: torch.device | str) -> ChoiceCount:
    """Counting as the model does while it serves."""
    totals = torch.zeros(EXPERTS, dtype=torch.int64, device=device)
    return ChoiceCount(totals, torch.zeros(rows, dtype=torch.int64, device=device), 1)


def launches(device: torch.device) -> Iterator[tuple[str, Callable[[], object]]]:
    for rows in (1, 17, 64, 512):
        for dtype in (torch.bfloat16, torch.float32):
            x = torch.empty(rows, WIDTH, dtype=torch.bfloat16, device=device)
            gate = torch.empty(EXPERTS, WIDTH, dtype=dtype, device=device)
            bias = torch.empty(EXPERTS, dtype=torch.float32, device=device)
            count = count_of(rows, device)
            yield (
                f"{rows} {dtype}",
                lambda x=x, g=gate, b=bias, c=count: route(x, g, b, TOP_K, SCALE, c),
            )
            if rows == 1 and dtype == torch.bfloat16:  # a single row's choice sorts its pairs too
                yield (
                    "1 row, sorted",
                    lambda x=x, g=gate, b=bias, c=count: route_sorted(
                        x, g, b, TOP_K, SCALE, c, 0, 32, 16
                    ),
                )


def problem(rows: int, dtype: torch.dtype) -> Problem:
    torch.manual_seed(0)
    sets = 64 if rows <= 512 else 2
    x = torch.randn(rows, WIDTH, device="cuda").bfloat16()
    gates = [
        (torch.randn(EXPERTS, WIDTH, device="cuda") / 78).bfloat16().to(dtype) for _ in range(sets)
    ]
    bias = torch.randn(EXPERTS, device="cuda") * 0.05 + 34
    count = count_of(rows, "cuda")
    outs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    ids, weights = reference.route(x.double(), gates[0].double(), bias.double(), TOP_K, SCALE)
    p = torch.sigmoid(x.double() @ gates[0].double().T) + bias.double()
    ranked = p.sort(-1, descending=True).values
    clear = ranked[:, TOP_K - 1] - ranked[:, TOP_K] > 1e-5  # elsewhere fp32 may choose otherwise

    def launch(i: int) -> None:
        outs[i] = route(x, gates[i], bias, TOP_K, SCALE, count)

    def error() -> float:
        got_ids, got = outs[0]
        if not torch.equal(got_ids[clear], ids[clear]):
            return float("inf")
        return float((got[clear].double() - weights[clear]).norm() / weights[clear].norm())

    def exact() -> bool:
        alone = route(x[-1:].contiguous(), gates[0], bias, TOP_K, SCALE)
        same = all(torch.equal(a, b[-1:]) for a, b in zip(alone, outs[0], strict=True))
        tied = torch.zeros_like(x[:1])  # every score is equal: the bias decides, then the lower id
        flat = torch.full_like(bias, 34.0)
        lowest = route(tied, gates[0], flat, TOP_K, SCALE)[0]
        return same and lowest.tolist() == [list(range(TOP_K))]

    return Problem(launch, sets, error, launches=20 if rows <= 512 else 6, exact=exact)


def cases() -> Iterator[Case]:
    for dtype in (torch.bfloat16, torch.float32):
        for rows in (1, 6, 32, 192, 8192):
            moved = EXPERTS * WIDTH * dtype.itemsize + rows * (2 * WIDTH + 96)
            yield Case(
                "router",
                f"{str(dtype)[6:]} gate, {rows} rows",
                lambda rows=rows, dtype=dtype: problem(rows, dtype),
                memory_us(moved),
                1e-5,
                None,
                (3.0 if rows <= 32 else 6.0) if rows <= 192 else None,
            )
