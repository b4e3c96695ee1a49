# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""Block-fp8 products of few rows on Hopper, in Gluon; `kernel.few_rows` is their plain form.

One warp brings tiles by TMA, a warpgroup multiplies: weights on the matrix unit's long side, rows
on its short one. The first stages of the weight are on their way before the kernel that makes the
rows has ended. Sums have the plain form's order; those of K chunks that programs of their own make
are exchanged in the order of a thread's registers.
"""

from __future__ import annotations

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
from .hopper import DEPTH, boxes

COLUMNS = gl.constexpr(64)  # weight rows of a tile
AHEAD = gl.constexpr(16)  # blocks whose scales are fetched at once
MOST_CHUNKS = gl.constexpr(8)  # of one weight
MOST_ROWS = 64


@gluon.jit
def _produce(
    x, weight, n0, m0, begin, end, x_tiles, w_tiles, full, empty, ROWS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    first = gl.minimum(end - begin, STAGES)
    for stage in range(first):
        barrier = full.index(stage)
        mbarrier.expect(barrier, (COLUMNS + ROWS) * DEPTH)
        tma.async_copy_global_to_shared(
            weight, [n0, (begin + stage) * DEPTH], barrier, w_tiles.index(stage)
        )
    wait_for_previous()
    for stage in range(first):
        tma.async_copy_global_to_shared(
            x, [m0, (begin + stage) * DEPTH], full.index(stage), x_tiles.index(stage)
        )
    stage = 0
    phase = 0
    for block in range(begin + STAGES, end):
        mbarrier.wait(empty.index(stage), phase)
        barrier = full.index(stage)
        mbarrier.expect(barrier, (COLUMNS + ROWS) * DEPTH)
        tma.async_copy_global_to_shared(weight, [n0, block * DEPTH], barrier, w_tiles.index(stage))
        tma.async_copy_global_to_shared(x, [m0, block * DEPTH], barrier, x_tiles.index(stage))
        stage, phase = step(stage, phase, STAGES)


@gluon.jit
def _consume(
    x_scales, weight_scales, partial, tickets, out, rows, width, blocks, n0, m0, begin, end, chunk,
    ways, slot, x_tiles, w_tiles, full, empty, scales, ROWS: gl.constexpr,
    STAGES: gl.constexpr, SPLIT: gl.constexpr, VIEW: gl.constexpr,
):  # fmt: skip
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    w_line = weight_scales + (n0 // DEPTH) * blocks
    FETCH: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    ahead = gl.arange(0, AHEAD, layout=gl.SliceLayout(1, FETCH))
    row = gl.minimum(m0 + gl.arange(0, ROWS, layout=gl.SliceLayout(0, FETCH)), rows - 1)
    w_scale = gl.load(w_line + gl.minimum(begin + ahead, end - 1))
    wait_for_previous()
    acc = gl.zeros([COLUMNS, ROWS], gl.float32, MMA)
    none = gl.zeros([COLUMNS, ROWS], gl.float32, MMA)
    lines = scales._reinterpret(gl.float32, [AHEAD, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    stage = 0
    phase = 0
    for first in range(begin, end, AHEAD):
        # No scale's load sits between a product and its use.
        at = gl.minimum(first + ahead, end - 1)
        x_scale = gl.load(x_scales + at[:, None] * rows + row[None, :])
        scales.store(w_scale[:, None] * x_scale)
        w_scale = gl.load(w_line + gl.minimum(at + AHEAD, end - 1))
        for block in range(first, gl.minimum(first + AHEAD, end)):
            mbarrier.wait(full.index(stage), phase)
            part = warpgroup_mma(
                w_tiles.index(stage), x_tiles.index(stage).permute((1, 0)), none, use_acc=False,
                is_async=True,
            )  # fmt: skip
            scale = lines.index(block - first).load(gl.SliceLayout(0, MMA))
            part = warpgroup_mma_wait(0, deps=[part])
            mbarrier.arrive(empty.index(stage))
            acc += part * scale[None, :]
            stage, phase = step(stage, phase, STAGES)
    view = acc.reshape([4, 2, 8, ROWS // 8, 4, 2]).permute([0, 2, 4, 3, 1, 5])
    acc = gl.convert_layout(view.reshape([128, ROWS // 2]), VIEW)
    thread = gl.arange(0, 128, layout=gl.SliceLayout(1, VIEW))
    register = gl.arange(0, ROWS // 2, layout=gl.SliceLayout(0, VIEW))
    n = n0 + (thread // 32 * 16 + thread // 4 % 8)[:, None] + (register // 2 % 2 * 8)[None, :]
    m = m0 + (thread % 4 * 2)[:, None] + (register // 4 * 8 + register % 2)[None, :]
    target = out + gl.minimum(m, rows - 1).to(gl.int64) * width + n
    wanted = (m < rows) & (n < width)
    if SPLIT:  # as `kernel.merge_chunks`
        SIZE: gl.constexpr = COLUMNS * ROWS
        place = partial + slot * ways * SIZE + thread[:, None] * 4
        place = place + (register // 4 * 512 + register % 4)[None, :]
        # Eight rows a unit of 16 bytes: units of rows that are not there stay away.
        kept = (register // 4 * 8 < rows - m0)[None, :]
        gl.store(place + chunk * SIZE, acc, mask=kept)
        gl.thread_barrier()  # every thread's partials before the ticket
        ticket = gl.atomic_add(tickets + slot, 1, sem="acq_rel")
        if ticket == ways - 1:
            gl.store(tickets + slot, 0)
            acc = gl.load(place, mask=kept, other=0.0, cache_modifier=".cg")
            # Unrolled, so that no chunk's load waits for the sum before it.
            for other in gl.static_range(1, MOST_CHUNKS):
                there = other < ways
                more = gl.load(
                    place + other * SIZE, mask=kept & there, other=0.0, cache_modifier=".cg"
                )
                acc = gl.where(there, acc + more, acc)
            gl.store(target, acc.to(out.dtype.element_ty), mask=wanted)
    else:
        gl.store(target, acc.to(out.dtype.element_ty), mask=wanted)


@gluon.jit(do_not_specialize=["rows", "per", "ways"])
def few_rows(
    x, x_scales, weight, weight_scales, partial, tickets, out, rows, width, depth, per, ways,
    ROWS: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """out [rows, width]; x and weight are descriptors of [ROWS, 128] and [64, 128] boxes.

    Program (tile and chunk of `per` blocks, rows); SPLIT: there is more than one chunk.
    """
    let_next_start()
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    x_tiles = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, ROWS, DEPTH], SHARED)
    w_tiles = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, COLUMNS, DEPTH], SHARED)
    scales = gl.allocate_shared_memory(
        gl.float32, [AHEAD, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    # A thread's sums lie in a line, so that it writes and reads 16 bytes at a time.
    REG: gl.constexpr = [[0, 1], [0, 2], [0, 4], [0, 8]]
    BITS: gl.constexpr = 3 if ROWS == 16 else 4
    VIEW: gl.constexpr = gl.DistributedLinearLayout(
        REG[:BITS], [[1, 0], [2, 0], [4, 0], [8, 0], [16, 0]], [[32, 0], [64, 0]], [],
        [128, ROWS // 2],
    )  # fmt: skip
    tile = gl.program_id(0) // ways
    chunk = gl.program_id(0) % ways
    begin = chunk * per
    end = begin + per
    n0 = tile * COLUMNS
    m0 = gl.program_id(1) * ROWS
    slot = gl.program_id(1) * (gl.num_programs(0) // ways) + tile
    gl.warp_specialize([
        (_consume, (
            x_scales, weight_scales, partial, tickets, out, rows, width, depth // DEPTH, n0, m0,
            begin, end, chunk, ways, slot, x_tiles, w_tiles, full, empty, scales, ROWS, STAGES,
            SPLIT, VIEW)),
        (_produce, (
            x, weight, n0, m0, begin, end, x_tiles, w_tiles, full, empty, ROWS, STAGES)),
    ], [1], [24])  # fmt: skip


def linear(
    x: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor,
    workspace: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor, chunks: int,
) -> None:  # fmt: skip
    """Fills out [R, N] with fp8 rows [R, K] times weight [N, K] transposed."""
    rows, width = out.shape
    blocks = x.shape[1] // DEPTH.value
    assert blocks % chunks == 0, (blocks, chunks)
    assert chunks <= MOST_CHUNKS.value, chunks
    tiles = -(-width // COLUMNS.value)
    height, registers = (16, 96) if rows <= 16 else (32, 112)
    few_rows[(tiles * chunks, -(-rows // height))](
        boxes(x, height), x_scales, boxes(weight, COLUMNS.value), weight_scales, *workspace, out,
        rows, width, x.shape[1], blocks // chunks, chunks, height, 6, chunks > 1, num_warps=4,
        maxnreg=registers, **pdl(),
    )  # fmt: skip
