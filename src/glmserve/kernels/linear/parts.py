# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""Products of few rows with a narrow weight whose K chunks nobody adds up: whoever reads the result
does, and need not wait for the last of several programs to have done it.

The chunks, and so the bits of their sum in order, are `kernel.few_rows`'.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..pdl import pdl
from ..triton_common import let_next_start, prefetch, to_bf16, wait_for_previous
from .kernel import chunk_product
from .launch import linear, plan

MOST_ROWS = 256
MOST_CHUNKS = tl.constexpr(8)
_WIDEST = 512  # rows of a weight whose every byte is fetched before the wait


@triton.jit(do_not_specialize=["rows", "chunks"])
def part_rows(
    x, weight, parts, rows, width, depth, chunks,
    BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """parts [chunks, rows, width] fp32 of x [rows, depth] weight [width, depth]^T.

    Program (tile and chunk, rows)."""
    let_next_start()
    per = tl.cdiv(depth // BK, chunks)
    chunk = tl.program_id(0) % chunks
    n = tl.program_id(0) // chunks * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    begin = chunk * per
    end = tl.minimum(begin + per, depth // BK)
    line = weight + tl.minimum(n, width - 1)[:, None].to(tl.int64) * depth
    far = begin * BK + tl.arange(0, 16) * 64  # 128 bytes each; chunks beyond 2 KB are rare
    prefetch(line + far[None, :], (far < end * BK)[None, :] & (n < width)[:, None])
    wait_for_previous()
    row = tl.program_id(1) * BM + tl.arange(0, BM)
    real = row < rows
    x_tile = x + tl.minimum(row, rows - 1)[:, None].to(tl.int64) * depth + k[None, :]
    acc = chunk_product(
        x_tile, x, 0, line + k[None, :], weight, begin, end, real, BN, BM, BK, False, STAGES
    )  # fmt: skip
    target = parts + (chunk * rows + row[None, :]).to(tl.int64) * width + n[:, None]
    tl.store(target, acc, mask=real[None, :] & (n < width)[:, None])


@triton.jit
def add_parts(at, step, parts, inside):
    """The sum of parts [parts, ...] in order, `step` elements from each other, as bf16 and then
    fp32. Unrolled, so that no part's load waits for the sum before it."""
    total = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, MOST_CHUNKS):
        there = part < parts
        more = tl.load(at + part * step, mask=inside & there, other=0.0).to(tl.float32)
        total = tl.where(there, total + more, total)
    return to_bf16(total).to(tl.float32)


def linear_parts(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[C, R, N] fp32 of x [R, K] and weight [N, K], bf16: the K chunks, or their sum alone."""
    rows, depth = x.shape
    width = len(weight)
    shape = None if depth % 64 else plan(width, depth, False)
    small = rows <= MOST_ROWS and width <= _WIDEST
    if shape is None or not small or not 1 < shape.chunks <= MOST_CHUNKS.value:
        return linear(x, weight, torch.float32)[None]
    out = torch.empty(shape.chunks, rows, width, dtype=torch.float32, device=x.device)
    block_n, block_m = 64, 16 if rows <= 16 else 32 if rows <= 32 else 64
    grid = (triton.cdiv(width, block_n) * shape.chunks, triton.cdiv(rows, block_m))
    if rows:
        part_rows[grid](
            x, weight, out, rows, width, depth, shape.chunks, block_n, block_m, shape.block_k, 4,
            num_warps=4, **pdl(),
        )  # fmt: skip
    return out
