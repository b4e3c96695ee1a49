# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""Block-fp8 products of 65 to 192 rows on Hopper (a heavy weight's from 33 on), in Gluon;
`kernel.many_rows` is their plain form.

A program holds 192 rows, three warpgroups of 64, against a narrow tile of columns, so that a weight
is read once. Where whole sums would leave the card idle, `ways` programs share a tile's K chunks:
each leaves its chunks' sums in the order of its registers, and when all have, each adds up its part
of the tile, chunk after chunk. The plain form serves the interpreter.

The programs of a tile wait for each other, so all of them must run at once. One program fits a
multiprocessor, and `form` allows no more programs than there are multiprocessors. A kernel before
this one ends without it; the one behind starts when every program here has called `let_next_start`
and so holds its multiprocessor already. A kernel of another stream that never ends would break
this: products of a device are launched on one stream (as `launch.workspace` asks anyway).
"""

from __future__ import annotations

import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..gluon_common import let_next_start, step, wait_for_previous
from ..pdl import pdl
from .hopper import DEPTH, PROGRAMS, ROWS, boxes, ring

GROUPS = gl.constexpr(3)  # warpgroups of 64 rows
MOST_CHUNKS = gl.constexpr(8)  # of one weight
TILE = GROUPS.value * ROWS.value  # rows of a program
STAGES = {32: 7, 64: 6}  # by a tile's columns
LEAST_DEPTH = 1024  # shorter sums are over before three warpgroups pay: the plain form
LEAST_SHARE = 1536  # of a sum, for each of the programs that share it: what an exchange costs
HEAVY = 16_000_000  # bytes of a weight that is served from 33 rows on


@gluon.jit
def _produce(
    x, weight, n0, m0, begin, end, x_tiles, w_tiles, full, empty, live, COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    first = gl.minimum(end - begin, STAGES)
    for stage in range(first):
        barrier = full.index(stage)
        for n in gl.static_range(1, GROUPS + 1):
            mbarrier.expect(barrier, (COLUMNS + n * ROWS) * DEPTH, pred=n == live)
        tma.async_copy_global_to_shared(
            weight, [n0, (begin + stage) * DEPTH], barrier, w_tiles.index(stage)
        )
    wait_for_previous()
    stage = 0
    phase = 1
    for block in range(begin, end):
        barrier = full.index(stage)
        if block >= begin + STAGES:
            mbarrier.wait(empty.index(stage), phase)
            for n in gl.static_range(1, GROUPS + 1):
                mbarrier.expect(barrier, (COLUMNS + n * ROWS) * DEPTH, pred=n == live)
            tma.async_copy_global_to_shared(
                weight, [n0, block * DEPTH], barrier, w_tiles.index(stage)
            )
        for group in gl.static_range(GROUPS):
            tma.async_copy_global_to_shared(
                x, [m0 + group * ROWS, block * DEPTH], barrier,
                x_tiles.index(stage * GROUPS + group), pred=group < live,
            )  # fmt: skip
        stage, phase = step(stage, phase, STAGES)


@gluon.jit
def _block(
    acc, x_scale, w_scale, x_line, x_stride, w_line, block, end, stage, phase, x_tiles, w_tiles,
    full, empty, GROUP: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """acc plus one K block, whose scales are given; returns those of the block after the next."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    none = gl.zeros([ROWS, COLUMNS], gl.float32, MMA)
    mbarrier.wait(full.index(stage), phase)
    part = warpgroup_mma(
        x_tiles.index(stage * GROUPS + GROUP), w_tiles.index(stage).permute((1, 0)), none,
        use_acc=False, is_async=True,
    )  # fmt: skip
    scale = (x_scale * w_scale)[:, None]
    after = gl.minimum(block + 2, end - 1)
    x_scale = gl.load(x_line + after * x_stride)
    w_scale = gl.load(w_line + after)
    part = warpgroup_mma_wait(0, deps=[part])
    mbarrier.arrive(empty.index(stage))
    acc += part * scale
    stage, phase = step(stage, phase, STAGES)
    return acc, x_scale, w_scale, stage, phase


@gluon.jit
def _consume(
    shared, GROUP: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr,
    CHUNKED: gl.constexpr, EVEN: gl.constexpr, VIEW: gl.constexpr, PART: gl.constexpr,
    SHARE: gl.constexpr,
):  # fmt: skip
    (
        x_scales, weight_scales, partial, tickets, out, rows, width, blocks, n0, m0, begin, end,
        way, ways, per, chunks, slot, x_tiles, w_tiles, full, empty,
    ) = shared  # fmt: skip
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    SIZE: gl.constexpr = ROWS * COLUMNS
    m0 += GROUP * ROWS
    w_line = weight_scales + (n0 // DEPTH) * blocks
    second = gl.minimum(begin + 1, end - 1)
    w_even = gl.load(w_line + begin)
    w_odd = gl.load(w_line + second)
    wait_for_previous()
    if m0 < rows:
        mine = m0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, MMA))
        x_line = x_scales + gl.minimum(mine, rows - 1)
        x_even = gl.load(x_line + begin * rows)
        x_odd = gl.load(x_line + second * rows)
        place = partial + (slot * GROUPS + GROUP) * chunks * SIZE
        thread = gl.arange(0, 128, layout=gl.SliceLayout(1, VIEW))
        register = gl.arange(0, COLUMNS // 2, layout=gl.SliceLayout(0, VIEW))
        lines = (
            place + thread[:, None] * 4 + (register // 4)[None, :] * 512 + (register % 4)[None, :]
        )
        stage = 0
        phase = 0
        acc = gl.zeros([ROWS, COLUMNS], gl.float32, MMA)
        total = acc
        for first in range(begin, end, per):
            for block in range(first, first + per, 2):
                acc, x_even, w_even, stage, phase = _block(
                    acc, x_even, w_even, x_line, rows, w_line, block, end, stage, phase, x_tiles,
                    w_tiles, full, empty, GROUP, COLUMNS, STAGES,
                )  # fmt: skip
                if EVEN or block + 1 < first + per:
                    acc, x_odd, w_odd, stage, phase = _block(
                        acc, x_odd, w_odd, x_line, rows, w_line, block + 1, end, stage, phase,
                        x_tiles, w_tiles, full, empty, GROUP, COLUMNS, STAGES,
                    )  # fmt: skip
            if SPLIT:
                view = acc.reshape([4, 2, 8, COLUMNS // 8, 4, 2]).permute([0, 2, 4, 3, 1, 5])
                view = gl.convert_layout(view.reshape([128, COLUMNS // 2]), VIEW)
                gl.store(lines + (first // per) * SIZE, view)
                acc = gl.zeros([ROWS, COLUMNS], gl.float32, MMA)
            elif CHUNKED:
                total += acc
                acc = gl.zeros([ROWS, COLUMNS], gl.float32, MMA)
            if not EVEN:  # the next chunk begins with the other's
                x_even, x_odd = x_odd, x_even
                w_even, w_odd = w_odd, w_even
        if SPLIT:
            gl.thread_barrier()  # every thread's sums before the ticket
            ticket = tickets + slot * GROUPS + GROUP
            arrived = gl.atomic_add(ticket, 1, sem="acq_rel") + 1
            while arrived < ways:
                arrived = gl.atomic_add(ticket, 0, sem="acquire")
            # Of all who saw that, the last to say so leaves the ticket as it was.
            if gl.atomic_add(ticket, 1, sem="relaxed") == 2 * ways - 1:
                gl.store(ticket, 0)
            gl.thread_barrier()
            worker = gl.arange(0, 128, layout=gl.SliceLayout(1, PART))
            at = gl.arange(0, SHARE, layout=gl.SliceLayout(0, PART))
            unit = way + at // 4 * ways
            mine = (unit < COLUMNS // 8)[None, :]
            there = place + worker[:, None] * 4 + (unit * 512 + at % 4)[None, :]
            acc = gl.load(there, mask=mine, other=0.0, cache_modifier=".cg")
            for other in gl.static_range(1, MOST_CHUNKS):
                real = other < chunks
                more = gl.load(
                    there + other * SIZE, mask=mine & real, other=0.0, cache_modifier=".cg"
                )
                acc = gl.where(real, acc + more, acc)
            row = m0 + (worker // 32 * 16 + worker // 4 % 8)[:, None] + (at // 2 % 2 * 8)[None, :]
            n = n0 + (worker % 4 * 2)[:, None] + (unit * 8 + at % 2)[None, :]
            gl.store(
                out + row * width + n,
                acc.to(out.dtype.element_ty),
                mask=mine & (row < rows) & (n < width),
            )
        else:
            if CHUNKED:
                acc = total
            n = n0 + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, MMA))
            gl.store(
                out + mine[:, None] * width + n[None, :],
                acc.to(out.dtype.element_ty),
                mask=(mine < rows)[:, None] & (n < width)[None, :],
            )
    else:
        stage = 0
        phase = 0
        for _ in range(begin, end):
            mbarrier.wait(full.index(stage), phase)
            mbarrier.arrive(empty.index(stage))
            stage, phase = step(stage, phase, STAGES)


@gluon.jit(do_not_specialize=["rows", "per", "ways", "chunks"])
def mid_rows(
    x, x_scales, weight, weight_scales, partial, tickets, out, rows, width, depth, per, chunks,
    ways, COLUMNS: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr, CHUNKED: gl.constexpr,
    EVEN: gl.constexpr, SHARE: gl.constexpr,
):  # fmt: skip
    """out [rows, width] bf16; x and weight are descriptors of [64, 128] and [COLUMNS, 128] boxes.

    Program (column tile and way, rows); a way takes chunks / ways chunks of `per` blocks. SPLIT:
    there is more than one way; CHUNKED: more than one chunk; EVEN: `per` is. SHARE: how many sums
    a thread has room to add up, those of a way. tickets are 0 before and after.
    """
    let_next_start()
    x_tiles, w_tiles, full, empty = ring(GROUPS, STAGES, COLUMNS)
    # Registers lie in a thread's row, so that it writes and reads 16 bytes at a time.
    REG: gl.constexpr = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16]]
    LANES: gl.constexpr = [[1, 0], [2, 0], [4, 0], [8, 0], [16, 0]]
    BITS: gl.constexpr = 4 if COLUMNS == 32 else 5
    VIEW: gl.constexpr = gl.DistributedLinearLayout(
        REG[:BITS], LANES, [[32, 0], [64, 0]], [], [128, COLUMNS // 2]
    )
    FEW: gl.constexpr = 3 if SHARE == 8 else 4
    PART: gl.constexpr = gl.DistributedLinearLayout(
        REG[:FEW], LANES, [[32, 0], [64, 0]], [], [128, SHARE]
    )
    tile = gl.program_id(0) // ways
    way = gl.program_id(0) % ways
    span = chunks // ways * per
    begin = way * span
    end = begin + span
    n0 = tile * COLUMNS
    m0 = gl.program_id(1) * GROUPS * ROWS
    live = gl.minimum((rows - m0 + ROWS - 1) // ROWS, GROUPS)
    slot = gl.program_id(1) * (gl.num_programs(0) // ways) + tile
    blocks = depth // DEPTH
    LIMIT: gl.constexpr = 160 if SPLIT else 112  # registers of a thread that multiplies
    shared = (
        x_scales, weight_scales, partial, tickets, out, rows, width, blocks, n0, m0, begin, end,
        way, ways, per, chunks, slot, x_tiles, w_tiles, full, empty,
    )  # fmt: skip
    gl.warp_specialize([
        (_consume, (
            shared, gl.constexpr(0), COLUMNS, STAGES, SPLIT, CHUNKED, EVEN, VIEW, PART, SHARE)),
        (_consume, (
            shared, gl.constexpr(1), COLUMNS, STAGES, SPLIT, CHUNKED, EVEN, VIEW, PART, SHARE)),
        (_consume, (
            shared, gl.constexpr(2), COLUMNS, STAGES, SPLIT, CHUNKED, EVEN, VIEW, PART, SHARE)),
        (_produce, (
            x, weight, n0, m0, begin, end, x_tiles, w_tiles, full, empty, live, COLUMNS, STAGES)),
    ], [4, 4, 1], [LIMIT, LIMIT, 24])  # fmt: skip


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count


def form(
    rows: int, width: int, depth: int, chunks: int, floats: int, device: torch.device
) -> tuple[int, int]:
    """(columns of a tile, programs that share its chunks), (0, 0) where not served: the most
    programs that run at once, of equally many those with wider tiles. floats: room for sums."""
    # A heavy weight is better read once by this form than twice by `hopper_few`'s 32-row tiles.
    least = 33 if width * depth >= HEAVY else 65
    if depth < LEAST_DEPTH or not least <= rows <= TILE:
        return 0, 0
    best, most = (0, 0, 0), min(PROGRAMS, _multiprocessors(device))
    for columns in STAGES:
        tiles = -(-width // columns)
        fits = tiles * TILE * columns * chunks <= floats
        for ways in range(1, chunks + 1):
            worth = ways == 1 or (fits and depth // ways >= LEAST_SHARE)
            if chunks % ways == 0 and tiles * ways <= most and worth:
                best = max(best, (tiles * ways, columns, ways))
    return best[1:]


def linear(
    x: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor,
    workspace: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor, chunks: int,
) -> None:  # fmt: skip
    """Fills out [R, N] with fp8 rows [R, K] times weight [N, K] transposed."""
    rows, width = out.shape
    blocks = x.shape[1] // DEPTH.value
    assert blocks % chunks == 0, (blocks, chunks)
    assert chunks <= MOST_CHUNKS.value, chunks
    columns, ways = form(rows, width, x.shape[1], chunks, workspace[0].numel(), x.device)
    assert columns, (rows, width)
    tiles, high, per = -(-width // columns), -(-rows // TILE), blocks // chunks
    # Units of 8 columns that a way adds up, 4 numbers a thread each; one size for two ways and up.
    share = 4 * (columns // 16)
    mid_rows[(tiles * ways, high)](
        boxes(x, ROWS.value), x_scales, boxes(weight, columns), weight_scales, *workspace, out,
        rows, width, x.shape[1], per, chunks, ways, columns, STAGES[columns], ways > 1, chunks > 1,
        per % 2 == 0, share, num_warps=4, maxnreg=128 if ways > 1 else 96, **pdl(),
    )  # fmt: skip
