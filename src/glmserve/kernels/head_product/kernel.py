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

from ..pdl import pdl
from ..quantise.kernel import quantise_groups
from ..quantise.reference import GROUP
from ..triton_common import dot, let_next_start, prefetch, to_bf16, wait_for_previous

# (most rows, tile); the first that fits is taken. Quantised results need whole groups of columns.
_TILES: tuple[tuple[float, dict[str, int]], ...] = (
    (16, {"BM": 16, "BN": 16, "BK": 64, "STAGES": 8, "num_warps": 1}),
    (64, {"BM": 16, "BN": 16, "BK": 64, "STAGES": 4, "num_warps": 1}),
    (512, {"BM": 64, "BN": 64, "BK": 64, "STAGES": 3, "num_warps": 4}),
    (float("inf"), {"BM": 128, "BN": 128, "BK": 64, "STAGES": 3, "num_warps": 8}),
)
_QUANTISED_TILES: tuple[tuple[float, dict[str, int]], ...] = (
    (512, {"BM": 64, "BN": 128, "BK": 64, "STAGES": 5, "num_warps": 4}),
    (float("inf"), {"BM": 128, "BN": 128, "BK": 64, "STAGES": 3, "num_warps": 8}),
)


@triton.jit
def _prefetch_weights(w, n0, w_k, w_n, K: tl.constexpr, BN: tl.constexpr, ALONG_K: tl.constexpr):
    """Columns [n0, n0 + BN) of w [K, N]; ALONG_K: k is the dimension without gaps."""
    UNIT: tl.constexpr = 32  # values in 64 bytes
    if ALONG_K:
        UNITS: tl.constexpr = K // UNIT
        i = tl.arange(0, triton.next_power_of_2(BN * UNITS))
        prefetch(w + (n0 + i // UNITS) * w_n + (i % UNITS) * UNIT * w_k, i < BN * UNITS)
    else:
        UNITS: tl.constexpr = triton.cdiv(BN, UNIT)
        i = tl.arange(0, triton.next_power_of_2(K * UNITS))
        prefetch(w + (i // UNITS) * w_k + (n0 + (i % UNITS) * UNIT) * w_n, i < K * UNITS)


@triton.jit(do_not_specialize=["rows"])
def head_product(
    x, w, out, scales, rope, rows, x_row, x_head, w_head, w_k, w_n, out_row, out_head,
    K: tl.constexpr, N: tl.constexpr, ROPE: tl.constexpr, QUANTISE: tl.constexpr,
    ALONG_K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out[r, h, :N] = x[r, h, :K] w[h]; with ROPE also out[r, h, N:] = the turned x[r, h, K:].

    QUANTISE: out is e4m3, with scales [heads * N / 128, rows].
    """
    let_next_start()
    head = tl.program_id(1)
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    there = (m < rows)[:, None]
    line = x + m.to(tl.int64)[:, None] * x_row + head * x_head
    target = out + m.to(tl.int64)[:, None] * out_row + head * out_head
    if tl.program_id(0) < N // BN:
        n0 = tl.program_id(0) * BN
        n = n0 + tl.arange(0, BN)
        k = tl.arange(0, BK)
        w += head.to(tl.int64) * w_head
        if BM == 16:
            _prefetch_weights(w, n0, w_k, w_n, K, BN, ALONG_K)
        weights = w + k[:, None] * w_k + n[None, :] * w_n
        acc = tl.zeros([BM, BN], tl.float32)
        wait_for_previous()
        for i in tl.range(0, K // BK, num_stages=STAGES):
            a = tl.load(line + i * BK + k[None, :], mask=there, other=0.0)
            acc = dot(a, tl.load(weights + i * BK * w_k), acc)
        result = to_bf16(acc)
        if QUANTISE:
            values, scale = quantise_groups(result.to(tl.float32))
            tl.store(target + n[None, :], values, mask=there)
            group = (head * N + n0) // BN
            tl.store(scales + group * rows + m, scale, mask=m < rows)
        else:
            tl.store(target + n[None, :], result, mask=there)
    elif ROPE:
        c = tl.arange(0, 64)[None, :]
        wait_for_previous()
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
    x: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    rope: torch.Tensor | None,
    scales: torch.Tensor | None = None,
) -> None:
    """x [R, H, >= K], w [H, K, N], out [R, H, >= N]: out[..., :N] = x[..., :K] w.

    With `rope` [R, 32, 2] the 64 values behind x's first K are turned into out's last 64. With
    `scales` [H * N / 128, R] out is e4m3, quantised behind a rounding to bf16; N in 128s.
    """
    heads, k, n = w.shape
    rows = len(x)
    tiles = _TILES if scales is None else _QUANTISED_TILES
    tile = next(tile for most, tile in tiles if rows <= most)
    if rows == 0:
        return
    if tile["BN"] == 16 and n >= 512:  # half as many programs a head of twice the width
        tile = tile | {"BN": 32, "num_warps": 2}
    # Tiles divide the head: small models have heads of 32.
    tile = tile | {"BN": math.gcd(n, tile["BN"]), "BK": math.gcd(k, tile["BK"])}
    tile["STAGES"] = min(tile["STAGES"], k // tile["BK"] + 1)  # short sums need no more
    assert scales is None or tile["BN"] == GROUP, w.shape
    columns = n // tile["BN"] + (rope is not None)
    head_product[(columns, heads, triton.cdiv(rows, tile["BM"]))](
        x, w, out, out if scales is None else scales, x if rope is None else rope, rows,
        x.stride(0), x.stride(1), w.stride(0), w.stride(1), w.stride(2), out.stride(0),
        out.stride(1), K=k, N=n, ROPE=rope is not None, QUANTISE=scales is not None,
        ALONG_K=w.stride(1) == 1, **tile, **pdl(),
    )  # fmt: skip
