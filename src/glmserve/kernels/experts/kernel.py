# SPDX-License-Identifier: Apache-2.0
"""Grouped products over sorted (row, expert) pairs, and the weighted sum back to rows.

The K chunks of `linear` apply: the same bits whether few rows or many are in the step.
"""

import triton
import triton.language as tl

from ..linear.kernel import SCALE_BLOCK, all_chunks, band_order, chunk_product
from ..triton_common import dot, let_next_start, to_bf16, wait_for_previous


@triton.jit
def tile_rows(tile_expert, tile_begin, tile_end, tile, BM: tl.constexpr):
    """(expert, positions [BM] in the order of the pairs, which of them exist) of one tile."""
    position = tl.load(tile_begin + tile) + tl.arange(0, BM)
    return tl.load(tile_expert + tile), position, position < tl.load(tile_end + tile)


@triton.jit(do_not_specialize=["pairs", "chunks"])
def grouped_few(
    x,
    weight,
    out,
    order,
    tile_expert,
    tile_begin,
    tile_end,
    pairs,
    width,
    depth,
    chunks,
    TOP_K: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """out[chunk, position] = x[row of the position] times its expert's weight, swap-AB, bf16.

    TOP_K > 0: x holds the step's rows and pair p belongs to row p // TOP_K; 0: x is in
    the order of the pairs already. weight [E, width, K]. SPLIT: out [chunks, pairs, width] fp32,
    what reads it adds the chunks; else out [pairs, width] bf16.
    """
    blocks = depth // BK
    per = tl.cdiv(blocks, chunks)
    ways = 1
    if SPLIT:
        ways = chunks
    columns = tl.cdiv(width, BN)
    # Tiles come fastest: which of them exist is then known without waiting for their number.
    max_tiles = tl.num_programs(0) // (columns * ways)
    program = tl.program_id(0) // ways
    tile = program % max_tiles
    column = program // max_tiles
    if tl.load(tile_expert + tile) >= 0:
        expert, position, real = tile_rows(tile_expert, tile_begin, tile_end, tile, BM)
        row = position
        if TOP_K > 0:
            row = tl.load(order + position, mask=real, other=0) // TOP_K
        row = tl.where(real, row, 0).to(tl.int64)
        n = column * BN + tl.arange(0, BN)
        k = tl.arange(0, BK)
        x_tile = x + row[:, None] * depth + k[None, :]
        w_row = expert.to(tl.int64) * width + tl.minimum(n, width - 1)
        w_tile = weight + w_row[:, None] * depth + k[None, :]
        store = real[None, :] & (n[:, None] < width)
        target = out + position[None, :].to(tl.int64) * width + n[:, None]
        if SPLIT:
            chunk = tl.program_id(0) % ways
            begin = chunk * per
            acc = chunk_product(
                x_tile, x, 0, w_tile, weight, begin, tl.minimum(begin + per, blocks), real,
                BN, BM, BK, False, STAGES,
            )  # fmt: skip
            tl.store(target + chunk.to(tl.int64) * pairs * width, acc, mask=store)
        else:
            acc = all_chunks(
                x_tile, x, 0, w_tile, weight, blocks, per, real, BN, BM, BK, False, STAGES,
            )  # fmt: skip
            tl.store(target, to_bf16(acc), mask=store)


@triton.jit(do_not_specialize=["x_rows", "per"])
def grouped_many(
    x,
    x_scales,
    weight,
    weight_scales,
    out,
    order,
    tile_expert,
    tile_begin,
    tile_end,
    tile_count,
    x_rows,
    width,
    depth,
    per,
    TOP_K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    CHUNKED: tl.constexpr,
    SCALED: tl.constexpr,
    BAND: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The same for many rows an expert, [BM, BN] tiles; weight is a descriptor of [E * width, K].
    On a GPU block-fp8 weights have `hopper` for it.

    A weight tile that passes its expert's last row reads the next one's; those columns are dropped.
    """
    blocks = depth // BK
    columns = tl.cdiv(width, BN)
    count = tl.load(tile_count)
    if tl.program_id(0) < count * columns:
        tile, column = band_order(tl.program_id(0), count, columns, BAND)
        expert, position, real = tile_rows(tile_expert, tile_begin, tile_end, tile, BM)
        row = position
        if TOP_K > 0:
            row = tl.load(order + position, mask=real, other=0) // TOP_K
        row = tl.where(real, row, 0).to(tl.int64)
        x_tile = x + row[:, None] * depth + tl.arange(0, BK)[None, :]
        n0 = column * BN
        acc = tl.zeros([BM, BN], tl.float32)
        total = tl.zeros([BM, BN], tl.float32)
        if SCALED:
            x_line = x_scales + row
            w_line = expert * tl.cdiv(width, SCALE_BLOCK) + n0 // SCALE_BLOCK
            w_line = weight_scales + w_line.to(tl.int64) * blocks
        for block in tl.range(0, blocks, num_stages=STAGES):
            rows_tile = tl.load(x_tile + block * BK)
            w_tile = weight.load([expert * width + n0, block * BK])
            if SCALED:
                scale = tl.load(x_line + block * x_rows) * tl.load(w_line + block)
                acc += tl.dot(rows_tile, w_tile.T) * scale[:, None]
            else:
                acc = dot(rows_tile, w_tile.T, acc)
            if CHUNKED:
                if block % per == per - 1:
                    total += acc
                    acc = tl.zeros([BM, BN], tl.float32)
        if CHUNKED:
            acc = total + acc
        n = n0 + tl.arange(0, BN)
        target = out + position[:, None].to(tl.int64) * width + n[None, :]
        tl.store(target, to_bf16(acc), mask=real[:, None] & (n[None, :] < width))


@triton.jit
def combine_rows(
    parts,
    place,
    weights,
    shared,
    out,
    pairs,
    width,
    TOP_K: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[row] = shared[row] + sum over the row's local pairs of weight * down output, pair order.

    parts [PARTS, pairs, width]: split sums, added in order and rounded to bf16 as one product.
    """
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < width
    wait_for_previous()
    let_next_start()
    total = tl.load(shared + row * width + n, mask=inside, other=0.0).to(tl.float32)
    for slot in tl.static_range(TOP_K):
        position = tl.load(place + row * TOP_K + slot).to(tl.int64)
        share = tl.load(weights + row * TOP_K + slot)
        here = inside & (position >= 0)
        at = parts + position * width + n
        value = tl.load(at, mask=here, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            value += tl.load(at + part * pairs.to(tl.int64) * width, mask=here, other=0.0)
        if PARTS > 1:
            value = to_bf16(value).to(tl.float32)
        total += value * share
    tl.store(out + row * width + n, to_bf16(total), mask=inside)
