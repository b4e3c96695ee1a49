# SPDX-License-Identifier: Apache-2.0
"""A small product for each head, x[r, h] W[h], in the Triton language: absorption and value-up.

Few rows stream the weights through many narrow CTAs; many rows use a square tile. Not its job: the
dense projections (`linear`).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from ..triton_common import dot, to_bf16

# (most rows, tile); the first that fits is taken.
_TILES: tuple[tuple[float, dict[str, int]], ...] = (
    (64, {"BM": 16, "BN": 32, "BK": 64, "STAGES": 4, "num_warps": 2}),
    (512, {"BM": 64, "BN": 64, "BK": 64, "STAGES": 3, "num_warps": 4}),
    (float("inf"), {"BM": 128, "BN": 128, "BK": 64, "STAGES": 3, "num_warps": 8}),
)


@triton.jit(do_not_specialize=["rows"])
def head_product(
    x, w, out, rope, rows, x_row, x_head, w_head, w_k, w_n, out_row, out_head,
    K: tl.constexpr, N: tl.constexpr, ROPE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out[r, h, :N] = x[r, h, :K] w[h]; with ROPE also out[r, h, N:] = the turned x[r, h, K:]."""
    head = tl.program_id(1)
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    there = (m < rows)[:, None]
    line = x + m.to(tl.int64)[:, None] * x_row + head * x_head
    target = out + m.to(tl.int64)[:, None] * out_row + head * out_head
    if tl.program_id(0) < N // BN:
        n = tl.program_id(0) * BN + tl.arange(0, BN)
        k = tl.arange(0, BK)
        weights = w + head.to(tl.int64) * w_head + k[:, None] * w_k + n[None, :] * w_n
        acc = tl.zeros([BM, BN], tl.float32)
        for i in tl.range(0, K // BK, num_stages=STAGES):
            a = tl.load(line + i * BK + k[None, :], mask=there, other=0.0)
            acc = dot(a, tl.load(weights + i * BK * w_k), acc)
        tl.store(target + n[None, :], to_bf16(acc), mask=there)
    elif ROPE:
        c = tl.arange(0, 64)[None, :]
        key = tl.load(line + K + c, mask=there, other=0.0).to(tl.float32)
        even, odd = tl.split(tl.reshape(key, [BM, 32, 2]))
        angle = tl.load(rope + m[:, None] * 64 + c, mask=there, other=0.0)
        cos, sin = tl.split(tl.reshape(angle, [BM, 32, 2]))
        turned = tl.join(even * cos - odd * sin, odd * cos + even * sin)
        tl.store(target + N + c, to_bf16(tl.reshape(turned, [BM, 64])), mask=there)


def unserved(k: int, n: int) -> dict[str, object]:
    """Why the product does not take weights [H, k, n]."""
    return {"head": (k, n)} if k % 32 or n % 32 else {}


def multiply_heads(
    x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, rope: torch.Tensor | None
) -> None:
    """x [R, H, >= K], w [H, K, N] (any strides), out [R, H, >= N]: out[..., :N] = x[..., :K] w.

    With `rope` [R, 32, 2] the 64 values behind x's first K are turned into out's last 64.
    """
    heads, k, n = w.shape
    rows = len(x)
    tile = next(tile for most, tile in _TILES if rows <= most)
    if rows == 0:
        return
    # Tiles divide the head: small models have heads of 32.
    tile = tile | {"BN": math.gcd(n, tile["BN"]), "BK": math.gcd(k, tile["BK"])}
    columns = n // tile["BN"] + (rope is not None)
    head_product[(columns, heads, triton.cdiv(rows, tile["BM"]))](
        x, w, out, x if rope is None else rope, rows, x.stride(0), x.stride(1),
        w.stride(0), w.stride(1), w.stride(2), out.stride(0), out.stride(1),
        K=k, N=n, ROPE=rope is not None, **tile,
    )  # fmt: skip
