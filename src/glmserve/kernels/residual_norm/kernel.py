# SPDX-License-Identifier: Apache-2.0
"""One row a program: residual addition, RMSNorm, and 1x128 quantisation where it is asked for."""

import triton
import triton.language as tl

from ..quantise.kernel import quantise_groups
from ..triton_common import let_next_start, to_bf16, wait_for_previous

GROUP = tl.constexpr(128)


@triton.jit
def norm_tile(tile, weight, width, eps):
    """RMSNorm of one row held as a [G, 128] fp32 tile with zeros beyond `width`."""
    mean = tl.sum(tl.sum(tile * tile, 1), 0) / width
    return tile * tl.rsqrt(mean + eps) * weight


@triton.jit
def residual_norm_rows(
    x,
    residual,
    weight,
    normed,
    total,
    values,
    scales,
    rows,
    width,
    eps,
    RESIDUAL: tl.constexpr,
    TOTAL: tl.constexpr,
    QUANTISE: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """x, residual, total, normed [rows, width]; values and scales as `QuantRows`."""
    let_next_start()
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = column < width
    at = row * width + column
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous()
    tile = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        tile += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    if TOTAL:
        rounded = to_bf16(tile)
        tl.store(total + at, rounded, mask=inside)
        tile = rounded.to(tl.float32)
    result = to_bf16(norm_tile(tile, gain, width, eps))
    tl.store(normed + at, result, mask=inside)
    if QUANTISE:
        quantised, scale = quantise_groups(result.to(tl.float32))
        tl.store(tl.max_contiguous(values + at, (1, 8)), quantised, mask=inside)
        tl.store(scales + group * rows + row, scale, mask=group * GROUP < width)
