# SPDX-License-Identifier: Apache-2.0
"""Top-2048 of fp32 scores, compared exactly with a stable sort."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from bench.registry import Case, Problem, memory_us
from glmserve.kernels.topk_select import reference
from glmserve.kernels.topk_select.launch import topk_select

K = 2048
PEERS = {
    (1, 8192): 4.86, (6, 8192): 4.93, (32, 8192): 5.1, (192, 8192): 7.51,
    (1, 102400): 8.27, (6, 102400): 8.35, (32, 102400): 21.2, (192, 102400): 75.25,
    (1, 1 << 20): 15.48, (6, 1 << 20): 19.54, (32, 1 << 20): 94.42, (192, 1 << 20): 404.48,
}  # fmt: skip


def launches(device: torch.device) -> Iterator[tuple[str, Callable[[], object]]]:
    few, many = (8256, 16384, 20480, 65536, 102400, 1 << 20, 1 << 21), (102400, 1 << 18)
    for rows, width in [(4, width) for width in few] + [(64, width) for width in many]:
        logits = torch.empty(rows, width, device=device)
        last = torch.empty(rows, dtype=torch.int64, device=device)
        yield f"{rows} x {width}", lambda x=logits, y=last: topk_select(x, K, y, 0)


def problem(rows: int, width: int, sets: int) -> Problem:
    torch.manual_seed(0)
    logits = [torch.randn(rows, width, device="cuda") for _ in range(sets)]
    last = torch.full((rows,), width - 1, device="cuda")
    outs: dict[int, torch.Tensor] = {}
    some = torch.unique(torch.linspace(0, rows - 1, 8, device="cuda").long())
    want = reference.topk_select(logits[0][some], K)

    def launch(i: int) -> None:
        outs[i] = topk_select(logits[i], K, last, 0)

    def error() -> float:
        return float((outs[0][some] != want).float().mean())

    return Problem(launch, sets, error, launches=20)


def cases() -> Iterator[Case]:
    for (rows, width), peer in PEERS.items():
        size = rows * width * 4
        sets = max(1, min(20, int(2.2e8 // size)))
        yield Case(
            "topk_select",
            f"{rows} rows of {width >> 10}K",
            lambda r=rows, w=width, s=sets: problem(r, w, s),
            memory_us(size),
            0.0,
            peer,
            round(1.3 * peer, 1),
        )
