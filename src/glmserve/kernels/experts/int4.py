# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""Grouped product of bf16 rows with int4 weights (groups of 32, 64 or 128 columns).

128 columns a step: the thread that holds a word makes its eight columns, scaled and rounded to
bf16. A sum's order is fixed by K alone.
"""

import triton
import triton.language as tl

from ..triton_common import dot, to_bf16
from .kernel import tile_rows

STEP = tl.constexpr(128)  # columns
WORD = tl.constexpr(8)  # columns in a word


@triton.jit
def _nibble(words, j: tl.constexpr, bias, scale):
    """Column j of every word: 2^23 + nibble as the bits of an fp32, so that nothing is converted;
    the zero point goes with 2^23."""
    bits = ((words >> (4 * j)) & 15) | 0x4B000000
    return to_bf16((bits.to(tl.float32, bitcast=True) - bias) * scale)


@triton.jit
def _columns(words, bias, scale):
    """[N, C] words -> [N, 8 C] bf16; bias and scale [N, C]."""
    a = tl.join(_nibble(words, 0, bias, scale), _nibble(words, 4, bias, scale))
    b = tl.join(_nibble(words, 2, bias, scale), _nibble(words, 6, bias, scale))
    c = tl.join(_nibble(words, 1, bias, scale), _nibble(words, 5, bias, scale))
    d = tl.join(_nibble(words, 3, bias, scale), _nibble(words, 7, bias, scale))
    columns = tl.join(tl.join(a, b), tl.join(c, d))  # the last dimension is a column's lowest bit
    return tl.reshape(columns, [words.shape[0], 8 * words.shape[1]])


@triton.jit
def _biases(zeros, shift, ASYMMETRIC: tl.constexpr):
    """2^23 plus the zero points, 8 where there are none."""
    if ASYMMETRIC:
        return ((zeros >> shift) & 15).to(tl.float32) + 8388608.0
    else:
        return tl.full(zeros.shape, 8388616.0, tl.float32)


@triton.jit(do_not_specialize=["pairs"])
def grouped_int4(
    x,
    packed,
    scales,
    zeros,
    out,
    order,
    tile_expert,
    tile_begin,
    tile_end,
    pairs,
    width,
    depth,
    TOP_K: tl.constexpr,
    GROUP: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    ASYMMETRIC: tl.constexpr,
    WAYS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """out[way, position] = x[row of the position] times its expert's weight, swap-AB.

    x as in `grouped_few`; packed [E, width, depth / 8], scales [E, width, depth / GROUP] bf16,
    zeros [E, width / 8, depth / GROUP]. out [WAYS, pairs, width] fp32 when WAYS > 1 (way w sums
    its share of the steps), else bf16.
    """
    columns = tl.cdiv(width, BN)
    max_tiles = tl.num_programs(0) // (columns * WAYS)
    program = tl.program_id(0) // WAYS
    way = tl.program_id(0) % WAYS
    tile = program % max_tiles
    column = program // max_tiles
    if tl.load(tile_expert + tile) >= 0:
        expert, position, real = tile_rows(tile_expert, tile_begin, tile_end, tile, BM)
        row = position
        if TOP_K > 0:
            row = tl.load(order + position, mask=real, other=0) // TOP_K
        row = tl.where(real, row, 0).to(tl.int64)
        n = column * BN + tl.arange(0, BN)
        w_row = expert.to(tl.int64) * width + tl.minimum(n, width - 1)
        word = tl.arange(0, STEP // WORD)
        w_tile = packed + w_row[:, None] * (depth // WORD) + word[None, :]
        group = word * WORD // GROUP
        s_tile = scales + w_row[:, None] * (depth // GROUP) + group[None, :]
        z_row = expert.to(tl.int64) * (width // WORD) + tl.minimum(n, width - 1) // WORD
        z_tile = zeros + z_row[:, None] * (depth // GROUP) + group[None, :]
        z_shift = (tl.minimum(n, width - 1) % WORD * 4)[:, None]
        x_tile = x + row[:, None] * depth + tl.arange(0, STEP)[None, :]
        steps = depth // STEP
        per = tl.cdiv(steps, WAYS)
        begin = way * per
        end = tl.minimum(begin + per, steps)
        acc = tl.zeros([BN, BM], tl.float32)
        # Scales and zero points are too narrow for the asynchronous pipeline: one step ahead.
        scale = tl.load(s_tile + begin * (STEP // GROUP))
        zero = tl.load(z_tile + begin * (STEP // GROUP)) if ASYMMETRIC else tl.zeros_like(z_shift)
        for step in tl.range(begin, end, num_stages=STAGES):
            words = tl.load(w_tile + step * (STEP // WORD))
            rows = tl.load(x_tile + step * STEP, mask=real[:, None], other=0.0)
            after = tl.minimum(step + 1, end - 1) * (STEP // GROUP)
            next_scale = tl.load(s_tile + after)
            next_zero = tl.load(z_tile + after) if ASYMMETRIC else zero
            weight = _columns(words, _biases(zero, z_shift, ASYMMETRIC), scale.to(tl.float32))
            acc = dot(weight, rows.T, acc)
            scale = next_scale
            zero = next_zero
        target = out + position[None, :].to(tl.int64) * width + n[:, None]
        store = real[None, :] & (n[:, None] < width)
        if WAYS > 1:
            tl.store(target + way.to(tl.int64) * pairs * width, acc, mask=store)
        else:
            tl.store(target, to_bf16(acc), mask=store)
