# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA: one rank of TP8 (8 heads), top-2048, fp8 and bf16 rows, permuted slots."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from bench.registry import Case, Problem, memory_us
from glmserve.kernels.quant import pack_latent_rows, unpack_latent_rows
from glmserve.kernels.sparse_mla.joining import MANY_ROWS
from glmserve.kernels.sparse_mla.launch import sparse_mla

K, SCALE = 2048, 256**-0.5
SPILLS = {
    "attend_fp8": "at most 30 of 255 registers, stored before the loop but for one (read in the "
    "SASS); eight warps spill nothing and took 1.7 times as long at 192 rows on an H200",
}


def launches(device: torch.device) -> Iterator[tuple[str, Callable[[], object]]]:
    few = ((6, K), (6, 64), (4096, K))
    # 32 and 64 heads are blocks of 16; of eight over fp8 rows the split follows the rows.
    sizes = [(8, 1 << 16, (*few, (32, K), (192, K))), (16, 1 << 16, few), (8, 1 << 22, few)]
    for heads, cache_rows, shapes in sizes:
        for rows, k in shapes:
            for width, dtype in ((656, torch.uint8), (576, torch.bfloat16)):
                query = torch.empty(rows, heads, 576, dtype=torch.bfloat16, device=device)
                cache = torch.empty(cache_rows, width, dtype=dtype, device=device)
                slots = torch.empty(rows, k, dtype=torch.int32, device=device)
                yield (
                    f"{heads} heads {rows} x {k} {dtype} {cache_rows} slots",
                    lambda q=query, c=cache, s=slots: sparse_mla(q, c, s, SCALE),
                )


def make_cache(slots: int, fp8: bool) -> torch.Tensor:
    """Random rows whose size differs by row: one in fifty is 30 times as large."""
    cache = torch.empty(
        slots, 656 if fp8 else 576, dtype=torch.uint8 if fp8 else torch.bfloat16, device="cuda"
    )
    for part in torch.split(cache, 1 << 16):
        x = torch.randn(len(part), 576, device="cuda")
        x[::50, :512] *= 30
        rope = x[:, 512:].bfloat16()
        part.copy_(pack_latent_rows(x[:, :512], rope) if fp8 else x.bfloat16())
    return cache


def wide(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    rows = cache.index_select(0, slots.flatten().long())
    return unpack_latent_rows(rows) if cache.dtype == torch.uint8 else rows.float()


def expected(query: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """fp32, a few rows at a time."""
    outs = []
    for q, s in zip(torch.split(query, 64), torch.split(slots, 64), strict=True):
        keys = wide(cache, s).view(*s.shape, 576)
        p = torch.softmax(torch.bmm(q.float(), keys.transpose(1, 2)) * SCALE, -1)
        outs.append(torch.bmm(p, keys[..., :512]))
    return torch.cat(outs)


def problem(rows: int, requests: int, context: int, fp8: bool, sets: int) -> Problem:
    torch.manual_seed(0)
    pools = max(requests, 1) * sets  # each input set reads contexts of its own
    cache = make_cache(pools * context, fp8)
    order = torch.randperm(pools * context, device="cuda", dtype=torch.int64)
    query = torch.randn(rows, 8, 576, device="cuda").bfloat16()
    selections = []
    per = rows // requests
    for i in range(sets):
        picks = []
        for row in range(rows):
            base = (i * requests + row // per) * context
            places = torch.randperm(context, device="cuda")[:K].sort().values + base
            picks.append(order[places])
        selections.append(torch.stack(picks).int())
    outs: dict[int, torch.Tensor] = {}

    def launch(i: int) -> None:
        outs[i] = sparse_mla(query, cache, selections[i], SCALE)

    some = torch.arange(0, rows, max(1, rows // 128), device="cuda")
    want = expected(query[some], cache, selections[0][some])

    def error() -> float:
        return float((outs[0][some].float() - want).norm() / want.norm())

    def exact() -> bool:  # alone = in the batch, bit for bit
        if rows > MANY_ROWS:
            return True
        one = query[-1:].contiguous(), cache, selections[0][-1:].contiguous()
        alone = sparse_mla(*one, SCALE)
        return torch.equal(alone, outs[0][-1:])

    return Problem(launch, sets, error, launches=max(4, min(20, 2000 // rows)), exact=exact)


def cases() -> Iterator[Case]:
    def case(rows, requests, context, fp8, sets, floor, peer, target=None, warm=""):  # type: ignore[no-untyped-def]
        kind = "fp8" if fp8 else "bf16"
        return Case(
            "sparse_mla",
            f"{kind} {rows} rows, {requests} requests, {context >> 10}K{warm}",
            lambda: problem(rows, requests, context, fp8, sets),
            floor,
            6e-3,
            peer,
            target,
        )

    size = 656 * K
    # Floors: the selected rows' bytes at the copy rate; from 32 rows on the time that plain loads
    # of the same rows took on the card.
    for rows, requests, sets, floor, peer, target in (
        (1, 1, 40, memory_us(size), 17.12, 8.5),
        (6, 1, 40, memory_us(6 * size), 18.16, 11.0),
        (32, 32, 2, 20.9, 46.11, 23.0),
        (192, 32, 2, 73.6, 175.35, 85.0),
    ):
        yield case(rows, requests, 8192, True, sets, floor, peer, target)
    yield case(1, 1, 8192, True, 1, memory_us(size), 17.12, None, " warm")
    yield case(6, 1, 8192, True, 1, memory_us(6 * size), 18.16, None, " warm")
    yield case(192, 32, 102400, True, 1, 73.6, 183.42)
    yield case(6, 1, 1 << 20, True, 1, memory_us(6 * size), 18.64)
    for rows, requests, sets in ((1, 1, 24), (6, 1, 24), (32, 32, 1), (192, 32, 1)):
        yield case(rows, requests, 8192, False, sets, memory_us(rows * K * 1152), None)
    yield case(8192, 1, 32768, True, 1, 1337.0, 4216.42, 2600.0)
    yield case(8192, 1, 32768, False, 1, None, 4216.42)
