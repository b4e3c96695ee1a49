# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""Products with weights whose input width is no multiple of 64: a small model cut over many ranks.

One tile size for any number of rows, so a row's sum has one order. Not its job: GLM's own widths
(`kernel`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..pdl import pdl
from ..triton_common import dot, let_next_start, to_bf16, wait_for_previous


@triton.jit(do_not_specialize=["rows"])
def narrow_rows(
    x, weight, out, rows, width, depth,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out [rows, width] = x [rows, depth] weight [width, depth]^T; program (rows, columns)."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros([BM, BN], tl.float32)
    let_next_start()
    wait_for_previous()
    for begin in tl.range(0, depth, BK):
        k = begin + tl.arange(0, BK)
        there = (k < depth)[None, :]
        x_tile = tl.load(
            x + m[:, None].to(tl.int64) * depth + k[None, :],
            mask=(m < rows)[:, None] & there,
            other=0.0,
        )
        w_tile = tl.load(
            weight + n[:, None].to(tl.int64) * depth + k[None, :],
            mask=(n < width)[:, None] & there,
            other=0.0,
        )
        acc = dot(x_tile, w_tile.T, acc)
    target = out + m[:, None].to(tl.int64) * width + n[None, :]
    wanted = (m < rows)[:, None] & (n < width)[None, :]
    if out.dtype.element_ty == tl.bfloat16:
        tl.store(target, to_bf16(acc), mask=wanted)
    else:
        tl.store(target, acc, mask=wanted)


def linear(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Fills out [R, N] with x [R, K] times weight [N, K] transposed, and returns it."""
    rows, width = out.shape
    if rows:
        narrow_rows[(triton.cdiv(rows, 16), triton.cdiv(width, 64))](
            x, weight, out, rows, width, x.shape[1], BM=16, BN=64, BK=32, num_warps=4, **pdl(),
        )  # fmt: skip
    return out
