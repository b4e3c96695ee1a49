# SPDX-License-Identifier: Apache-2.0
"""silu(gate) * up, plain or quantised by 1x128, on finished rows or on split-K partial sums.

The partials of a split product are added in split order and rounded to bf16 first, so the result
has the bits that a finished product would give.
"""

import triton
import triton.language as tl

from ..quantise.kernel import quantise_groups
from ..triton_common import to_bf16

GROUP = tl.constexpr(128)


@triton.jit
def _sum_of_parts(pointer, at, inside, stride, PARTS: tl.constexpr):
    total = tl.load(pointer + at, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(pointer + part * stride + at, mask=inside, other=0.0)
    if PARTS > 1:
        total = to_bf16(total).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["rows", "stride"])
def swiglu_rows(
    gate_up,
    out,
    scales,
    count,
    rows,
    inner,
    stride,
    PARTS: tl.constexpr,
    QUANTISE: tl.constexpr,
    COUNTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (r, b): groups [b * BLOCK, (b + 1) * BLOCK) of rows r, r + programs, ...

    gate_up [PARTS, rows, 2 inner], `stride` elements between parts; out [rows, inner] bf16, or e4m3
    with scales [groups, rows]. COUNTED: only the first count[0] rows exist.
    """
    group = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = column < inner
    existing = rows
    if COUNTED:
        existing = tl.load(count)
    wide = inner.to(tl.int64)  # the interpreter's loop variables are plain numbers
    for row in tl.range(tl.program_id(0), existing, tl.num_programs(0)):
        at = row * (2 * wide) + column
        gate = _sum_of_parts(gate_up, at, inside, stride, PARTS)
        up = _sum_of_parts(gate_up, at + inner, inside, stride, PARTS)
        result = to_bf16(gate * tl.sigmoid(gate) * up)
        if QUANTISE:
            quantised, scale = quantise_groups(result.to(tl.float32))
            tl.store(out + row * wide + column, quantised, mask=inside)
            tl.store(scales + group * rows + row, scale, mask=group * GROUP < inner)
        else:
            tl.store(out + row * wide + column, result, mask=inside)
