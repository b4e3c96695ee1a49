# SPDX-License-Identifier: Apache-2.0
"""Products of rows with a [N, K] weight, bf16 or block-fp8, for few rows and for many.

K is cut into chunks whose number depends on the weight alone. A chunk is summed front to back, the
chunks are added in order: whether one program does all of them or each has its own, and whatever
else is in the step, a row's result has the same bits.
"""

import triton
import triton.language as tl

from ..triton_common import dot, let_next_start, to_bf16

SCALE_BLOCK = tl.constexpr(128)


@triton.jit
def chunk_product(
    x,
    x_scales,
    x_scale_stride,
    weight,
    weight_scales,
    begin,
    end,
    real,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    SCALED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Sum over the K blocks [begin, end) of weight tile times row tile, [BN, BM] fp32.

    Weights lie on the matrix unit's long side, rows on its short one (swap-AB). x and x_scales are
    pointer tiles [BM, BK] and [BM] at block 0, weight a pointer tile [BN, BK], weight_scales the
    tile's line. real [BM]: rows that exist; the others read zeros.
    """
    acc = tl.zeros([BN, BM], tl.float32)
    if SCALED:
        # Scales come one block ahead: their load must not sit between a product and its use.
        scale = tl.load(weight_scales + begin) * tl.load(
            x_scales + begin * x_scale_stride, mask=real, other=0.0
        )
        for block in tl.range(begin, end, num_stages=STAGES):
            w_tile = tl.load(weight + block * BK)
            x_tile = tl.load(x + block * BK, mask=real[:, None], other=0.0)
            after = tl.minimum(block + 1, end - 1)
            next_scale = tl.load(weight_scales + after) * tl.load(
                x_scales + after * x_scale_stride, mask=real, other=0.0
            )
            acc += tl.dot(w_tile, x_tile.T) * scale[None, :]
            scale = next_scale
    else:
        for block in tl.range(begin, end, num_stages=STAGES):
            w_tile = tl.load(weight + block * BK)
            x_tile = tl.load(x + block * BK, mask=real[:, None], other=0.0)
            acc = dot(w_tile, x_tile.T, acc)
    return acc


@triton.jit
def all_chunks(
    x,
    x_scales,
    x_scale_stride,
    weight,
    weight_scales,
    blocks,
    per,
    real,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    SCALED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The chunks of `per` blocks, each summed by itself, added in order."""
    total = tl.zeros([BN, BM], tl.float32)
    for begin in tl.range(0, blocks, per):
        total += chunk_product(
            x, x_scales, x_scale_stride, weight, weight_scales, begin,
            tl.minimum(begin + per, blocks), real, BN, BM, BK, SCALED, STAGES,
        )  # fmt: skip
    return total


@triton.jit
def merge_chunks(
    acc, target, wanted, partial, tickets, slot, local, kept, chunk, chunks, SIZE: tl.constexpr
):
    """Leaves this chunk of a tile in `partial` [slots, chunks, SIZE] fp32; the program that comes
    last, as `tickets` [slots] tells, adds all chunks in order, stores them and resets the ticket.

    local: a tile of offsets below SIZE; kept, wanted: what of it is real here and in the result.
    """
    mine = partial + slot * chunks * SIZE + local
    tl.store(mine + chunk * SIZE, acc, mask=kept)
    tl.debug_barrier()  # every thread's partials before the ticket
    ticket = tl.atomic_add(tickets + slot, 1, sem="acq_rel")
    if ticket == chunks - 1:
        tl.store(tickets + slot, 0)
        total = tl.load(mine, mask=kept, other=0.0, cache_modifier=".cg")
        for other in tl.range(1, chunks):
            total += tl.load(mine + other * SIZE, mask=kept, other=0.0, cache_modifier=".cg")
        _store(target, total, wanted)


@triton.jit
def _store(target, value, mask):
    if target.dtype.element_ty == tl.bfloat16:
        tl.store(target, to_bf16(value), mask=mask)
    else:
        tl.store(target, value, mask=mask)


@triton.jit(do_not_specialize=["rows", "chunks"])
def few_rows(
    x,
    x_scales,
    weight,
    weight_scales,
    partial,
    tickets,
    out,
    rows,
    width,
    depth,
    chunks,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    SCALED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """out [rows, width] = x [rows, depth] weight [width, depth]^T; program (tile and chunk, rows).

    SPLIT: each chunk has its own program (`merge_chunks`; tickets are 0 before and after).
    """
    let_next_start()
    blocks = depth // BK
    per = tl.cdiv(blocks, chunks)
    ways = 1
    if SPLIT:
        ways = chunks
    tile = tl.program_id(0) // ways
    row_block = tl.program_id(1)
    line = tl.arange(0, BN)
    n = tile * BN + line
    m = tl.arange(0, BM)
    row = row_block * BM + m
    real = row < rows
    safe = tl.minimum(row, rows - 1).to(tl.int64)
    k = tl.arange(0, BK)
    x_tile = x + safe[:, None] * depth + k[None, :]
    w_tile = weight + tl.minimum(n, width - 1)[:, None].to(tl.int64) * depth + k[None, :]
    w_line = weight_scales + (tile * BN // SCALE_BLOCK) * blocks
    wanted = real[None, :] & (n[:, None] < width)
    target = out + safe[None, :] * width + n[:, None]
    if SPLIT:
        chunk = tl.program_id(0) % ways
        begin = chunk * per
        acc = chunk_product(
            x_tile, x_scales + safe, rows, w_tile, w_line, begin, tl.minimum(begin + per, blocks),
            real, BN, BM, BK, SCALED, STAGES,
        )  # fmt: skip
        slot = row_block * (tl.num_programs(0) // ways) + tile
        merge_chunks(
            acc, target, wanted, partial, tickets, slot, line[:, None] + m[None, :] * BN,
            wanted, chunk, chunks, BN * BM,
        )  # fmt: skip
    else:
        total = all_chunks(
            x_tile, x_scales + safe, rows, w_tile, w_line, blocks, per,
            real, BN, BM, BK, SCALED, STAGES,
        )  # fmt: skip
        _store(target, total, wanted)


@triton.jit(do_not_specialize=["rows", "chunks"])
def many_rows(
    x,
    x_scales,
    weight,
    weight_scales,
    partial,
    tickets,
    out,
    rows,
    width,
    depth,
    chunks,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    CHUNKED: tl.constexpr,
    SPLIT: tl.constexpr,
    SCALED: tl.constexpr,
    BAND: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The same product in [BM, BN] tiles; x and weight are descriptors.

    Programs walk down bands of BAND row tiles, so that a band's rows stay in L2 while the weight
    passes once. CHUNKED: there is more than one chunk.
    """
    let_next_start()
    blocks = depth // BK
    per = tl.cdiv(blocks, chunks)
    ways = 1
    if SPLIT:
        ways = chunks
    program = tl.program_id(0) // ways
    row_tile, tile = band_order(program, tl.cdiv(rows, BM), tl.cdiv(width, BN), BAND)
    m0 = row_tile * BM
    n0 = tile * BN
    row = m0 + tl.arange(0, BM)
    n = n0 + tl.arange(0, BN)
    real = row < rows
    x_line = x_scales + tl.minimum(row, rows - 1)
    w_line = weight_scales + (n0 // SCALE_BLOCK) * blocks
    target = out + row[:, None].to(tl.int64) * width + n[None, :]
    wanted = real[:, None] & (n[None, :] < width)
    begin = 0
    end = blocks
    if SPLIT:
        chunk = tl.program_id(0) % ways
        begin = chunk * per
        end = tl.minimum(begin + per, blocks)
    acc = tl.zeros([BM, BN], tl.float32)
    total = tl.zeros([BM, BN], tl.float32)
    for block in tl.range(begin, end, num_stages=STAGES):
        x_tile = x.load([m0, block * BK])
        w_tile = weight.load([n0, block * BK])
        if SCALED:
            scale = tl.load(x_line + block * rows) * tl.load(w_line + block)
            acc += tl.dot(x_tile, w_tile.T) * scale[:, None]
        else:
            acc = dot(x_tile, w_tile.T, acc)
        if CHUNKED and not SPLIT:
            if block % per == per - 1:
                total += acc
                acc = tl.zeros([BM, BN], tl.float32)
    if SPLIT:
        local = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
        merge_chunks(
            acc, target, wanted, partial, tickets, program, local, wanted, chunk, chunks, BM * BN
        )
    else:
        if CHUNKED:
            # An empty last chunk adds zeros, as it does in the split form.
            acc = total + acc
        _store(target, acc, wanted)


@triton.jit
def band_order(program, row_tiles, tiles, BAND: tl.constexpr):
    """(row tile, column tile) of a program that walks bands of BAND row tiles."""
    band = program // (BAND * tiles)
    height = tl.minimum(row_tiles - band * BAND, BAND)
    inside = program - band * BAND * tiles
    return band * BAND + inside % height, inside // height
