# SPDX-License-Identifier: Apache-2.0
"""Index scores: decode and verify rows over paged fp8 keys, and a prefill chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from bench.registry import Case, Problem, arithmetic_us, memory_us
from glmserve.kernels.index_logits.kernel import index_logits
from glmserve.kernels.quant import quantise_index, read_index_pages, write_index_rows

PAGE, ROW = 64, 132


def launches(device: torch.device) -> Iterator[tuple[str, Callable[[], object]]]:
    def call(sequences: int, rows: int | None, fp8: bool) -> Callable[[], object]:
        count = sequences * (rows or 1)
        query = torch.empty(count, 32, 128, device=device).to(
            torch.float8_e4m3fn if fp8 else torch.bfloat16
        )
        cache = torch.empty(
            1 << 14, ROW if fp8 else 128, dtype=torch.uint8 if fp8 else torch.bfloat16,
            device=device,
        )  # fmt: skip
        return lambda: index_logits(
            query,
            torch.empty(count, 32, device=device),
            cache,
            torch.empty(sequences, 256, dtype=torch.int32, device=device),
            torch.empty(count, dtype=torch.int64, device=device),
            torch.empty(count, dtype=torch.int64, device=device),
            0,
            256 * PAGE,
            rows,
            False,
        )

    for rows in range(1, 10):
        yield f"requests of {rows}", call(32, rows, True)
    for fp8 in (True, False):
        yield f"any rows, fp8 {fp8}", call(128, None, fp8)


def problem(requests: int, rows: int, context: int, sets: int, prefill: bool) -> Problem:
    torch.manual_seed(0)
    per = -(-context // PAGE)
    pages = requests * per * sets
    cache = torch.empty(pages * PAGE, ROW, dtype=torch.uint8, device="cuda")
    for begin in range(0, pages, 4096):
        part = cache[begin * PAGE : (begin + 4096) * PAGE]
        keys = torch.randn(len(part), 128, device="cuda")
        keys[::50] *= 30
        write_index_rows(part, torch.arange(len(part), device="cuda"), keys)
    order = torch.randperm(pages, device="cuda").int().view(sets, requests, per)
    count = requests * rows
    query, scale = quantise_index(torch.randn(count, 32, 128, device="cuda"))
    weights = torch.randn(count, 32, device="cuda") * 0.02 * scale
    row_seq = torch.arange(requests, device="cuda").repeat_interleave(rows)
    last = torch.arange(context - rows, context, device="cuda").repeat(requests)
    outs: dict[int, torch.Tensor] = {}

    def launch(i: int) -> None:
        outs.clear()
        outs[0] = index_logits(
            query, weights, cache, order[i], row_seq, last, 0, per * PAGE,
            None if prefill else rows, False,
        )  # fmt: skip

    some = torch.unique(torch.linspace(0, count - 1, 12, device="cuda").long()).tolist()

    def error() -> float:
        wrong, size = 0.0, 0.0
        for row in some:
            keys = read_index_pages(cache, order[0, row_seq[row]]).flatten(0, 1)
            seen = int(last[row]) + 1
            want = torch.relu(keys[:seen] @ query[row].float().T) @ weights[row]
            wrong += float((outs[0][row, :seen] - want).square().sum())
            size += float(want.square().sum())
        return (wrong / size) ** 0.5

    return Problem(launch, sets, error, launches=4 if count * context > 1 << 24 else 20)


def cases() -> Iterator[Case]:
    torch.backends.cuda.matmul.allow_tf32 = False
    peers = {
        (1, 1, 8192): 3.55, (1, 1, 102400): 5.27, (1, 1, 1 << 20): 33.23,
        (1, 6, 102400): 17.5, (1, 6, 1 << 20): 106.5,
        (32, 1, 8192): 7.5, (32, 1, 102400): 105.89, (32, 6, 102400): 327.8,
    }  # fmt: skip
    targets = {
        (1, 1, 8192): 4.1, (1, 1, 102400): 6.1, (1, 1, 1 << 20): 38.2, (1, 6, 102400): 10.0,
        (1, 6, 1 << 20): 75.0, (32, 1, 8192): 8.6, (32, 1, 102400): 121.8, (32, 6, 102400): 210.0,
    }  # fmt: skip
    for requests, rows, context, sets in (
        (1, 1, 8192, 190), (1, 1, 8192, 1), (1, 1, 102400, 16), (1, 1, 1 << 20, 2),
        (1, 6, 8192, 190), (1, 6, 102400, 16), (1, 6, 1 << 20, 2),
        (32, 1, 8192, 6), (32, 1, 8192, 1), (32, 1, 102400, 1),
        (32, 6, 8192, 6), (32, 6, 102400, 1),
    ):  # fmt: skip
        key = (requests, rows, context)
        moved = requests * (context * ROW + rows * context * 4)
        warm = " warm" if context == 8192 and sets == 1 else ""  # as the peer was timed there
        yield Case(
            "index_logits",
            f"{requests} requests x {rows} rows, {context >> 10}K{warm}",
            lambda r=requests, n=rows, c=context, s=sets: problem(r, n, c, s, False),
            memory_us(moved),
            1e-3,
            peers.get(key),
            targets.get(key),
        )
    flops = 2 * 32 * 128 * 8192 * 8192 / 2
    yield Case(
        "index_logits",
        "prefill 8192 x 8192, causal",
        lambda: problem(1, 8192, 8192, 1, True),
        arithmetic_us(flops, 1580),
        1e-3,
        296.42,
        400.0,
    )
