# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""Grouped product of bf16 rows with int4 weights (groups of 32, 64 or 128 columns).

128 columns a step: their words are spread to nibbles in registers, where a word's eight columns
stay with one thread, scaled, rounded to bf16 and multiplied. A sum's order is fixed by K alone.
"""

import triton
import triton.language as tl

from ..triton_common import dot, to_bf16
from .kernel import tile_rows

STEP = tl.constexpr(128)  # columns
WORD = tl.constexpr(8)  # columns in a word
UNIT = tl.constexpr(32)  # columns that a scale is loaded for: the smallest group


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
    UNITS: tl.constexpr = STEP // UNIT
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
        unit = tl.arange(0, UNITS)
        word = tl.arange(0, UNIT // WORD)
        inside = unit[:, None] * (UNIT // WORD) + word[None, :]
        w_tile = packed + w_row[:, None, None] * (depth // WORD) + inside[None, :, :]
        group = unit * UNIT // GROUP
        s_tile = scales + w_row[:, None] * (depth // GROUP) + group[None, :]
        z_row = expert.to(tl.int64) * (width // WORD) + tl.minimum(n, width - 1) // WORD
        z_tile = zeros + z_row[:, None] * (depth // GROUP) + group[None, :]
        z_shift = (tl.minimum(n, width - 1) % WORD * 4)[:, None]
        x_tile = x + row[:, None] * depth + tl.arange(0, STEP)[None, :]
        shifts = tl.arange(0, WORD) * 4
        steps = depth // STEP
        per = tl.cdiv(steps, WAYS)
        acc = tl.zeros([BN, BM], tl.float32)
        for step in tl.range(way * per, tl.minimum(way * per + per, steps), num_stages=STAGES):
            words = tl.load(w_tile + step * (STEP // WORD))
            scale = tl.load(s_tile + step * (STEP // GROUP)).to(tl.float32)
            rows = tl.load(x_tile + step * STEP, mask=real[:, None], other=0.0)
            # 2^23 + nibble as the bits of an fp32: no conversion, and the zero goes with 2^23.
            nibbles = ((words[:, :, :, None] >> shifts[None, None, None, :]) & 15) | 0x4B000000
            zero = tl.full([BN, UNITS], 8388616.0, tl.float32)
            if ASYMMETRIC:
                zero = ((tl.load(z_tile + step * (STEP // GROUP)) >> z_shift) & 15).to(tl.float32)
                zero += 8388608.0
            weight = (nibbles.to(tl.float32, bitcast=True) - zero[:, :, None, None]) * scale[
                :, :, None, None
            ]
            acc = dot(tl.reshape(to_bf16(weight), [BN, STEP]), rows.T, acc)
        target = out + position[None, :].to(tl.int64) * width + n[:, None]
        store = real[None, :] & (n[:, None] < width)
        if WAYS > 1:
            tl.store(target + way.to(tl.int64) * pairs * width, acc, mask=store)
        else:
            tl.store(target, to_bf16(acc), mask=store)
