# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""Grouped product of bf16 rows with int4 weights (groups of 32, 64 or 128 columns).

A word holds eight neighbouring columns. Rather than spread it, nibble j of all words is one product
of its own with the rows' columns 8 c + j: `gather_rows` puts these side by side, so that neither
operand is shuffled in registers. A sum's order is fixed by K alone.
"""

import triton
import triton.language as tl

from ..triton_common import dot, to_bf16
from .kernel import tile_rows

WORD = tl.constexpr(8)  # columns in a word


@triton.jit(do_not_specialize=["pairs"])
def gather_rows(x, out, order, count, pairs, words, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """out[p, j, c] = x[row of p, 8 c + j] for the first count[0] positions p, [pairs, 8, words]."""
    position = tl.program_id(0).to(tl.int64)
    if position < tl.load(count):
        row = position
        if TOP_K > 0:
            row = (tl.load(order + position) // TOP_K).to(tl.int64)
        word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        j = tl.arange(0, WORD)
        inside = (word < words)[:, None]
        value = tl.load(
            x + row * words * WORD + word[:, None] * WORD + j[None, :], mask=inside, other=0.0
        )
        tl.store(out + (position * WORD + j[None, :]) * words + word[:, None], value, mask=inside)


@triton.jit
def grouped_int4(
    x,
    packed,
    scales,
    zeros,
    out,
    tile_expert,
    tile_begin,
    tile_end,
    pairs,
    width,
    words,
    GROUP_WORDS: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    ASYMMETRIC: tl.constexpr,
    WAYS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """x [pairs, 8, words] from `gather_rows`; packed [E, width, words]; scales [E, width, words /
    GROUP_WORDS] bf16, zeros [E, width / 8, words / GROUP_WORDS]. out [WAYS, pairs, width] fp32 when
    WAYS > 1 (part w sums the blocks of its share of K), else bf16. BC words a step.
    """
    columns = tl.cdiv(width, BN)
    max_tiles = tl.num_programs(0) // (columns * WAYS)
    program = tl.program_id(0) // WAYS
    way = tl.program_id(0) % WAYS
    tile = program % max_tiles
    column = program // max_tiles
    if tl.load(tile_expert + tile) >= 0:
        expert, position, real = tile_rows(tile_expert, tile_begin, tile_end, tile, BM)
        safe = tl.where(real, position, 0).to(tl.int64)
        n = column * BN + tl.arange(0, BN)
        c = tl.arange(0, BC)
        row = expert.to(tl.int64) * width + tl.minimum(n, width - 1)
        w_tile = packed + row[:, None] * words + c[None, :]
        x_tile = x + safe[:, None] * (WORD * words) + c[None, :]
        groups = words // GROUP_WORDS
        s_tile = scales + row[:, None] * groups + (c // GROUP_WORDS)[None, :]
        z_tile = zeros + (row // WORD)[:, None] * groups + (c // GROUP_WORDS)[None, :]
        z_shift = ((row % WORD) * 4).to(tl.int32)[:, None]
        blocks = words // BC
        per = tl.cdiv(blocks, WAYS)
        acc = tl.zeros([BN, BM], tl.float32)
        for block in tl.range(way * per, tl.minimum(way * per + per, blocks), num_stages=STAGES):
            word = tl.load(w_tile + block * BC)
            scale = tl.load(s_tile + block * (BC // GROUP_WORDS)).to(tl.float32)
            zero = 8.0
            if ASYMMETRIC:
                zero = tl.load(z_tile + block * (BC // GROUP_WORDS))
                zero = ((zero >> z_shift) & 15).to(tl.float32)
            for j in tl.static_range(WORD):
                weight = to_bf16((((word >> (4 * j)) & 15).to(tl.float32) - zero) * scale)
                rows = tl.load(x_tile + j * words + block * BC, mask=real[:, None], other=0.0)
                acc = dot(weight, rows.T, acc)
        target = out + position[None, :].to(tl.int64) * width + n[:, None]
        store = real[None, :] & (n[:, None] < width)
        if WAYS > 1:
            tl.store(target + way.to(tl.int64) * pairs * width, acc, mask=store)
        else:
            tl.store(target, to_bf16(acc), mask=store)
