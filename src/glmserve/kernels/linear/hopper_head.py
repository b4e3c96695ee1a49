# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""bf16 products of 65 to 192 rows with a wide weight (the head's shard) on Hopper, in Gluon;
`kernel.many_rows` is their plain form.

A program holds 192 rows, three warpgroups of 64, against 160 columns: the weight passes once, in
one wave. A warpgroup's next products are under way before it waits for those before.
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..gluon_common import let_next_start, step, wait_for_previous
from ..pdl import pdl
from .hopper import ROWS

GROUPS = gl.constexpr(3)  # warpgroups of 64 rows
WIDE, NARROW = gl.constexpr(128), gl.constexpr(32)  # columns of the two products of a tile
DEPTH = gl.constexpr(64)
STAGES = gl.constexpr(5)
LAYOUT = gl.NVMMASharedLayout(128, 16, 2)


@gluon.jit
def _produce(x, wide, narrow, n0, m0, live, blocks, x_tiles, wide_tiles, narrow_tiles, full, empty):
    BYTES: gl.constexpr = (WIDE + NARROW) * DEPTH * 2
    first = gl.minimum(blocks, STAGES)
    for stage in range(first):
        barrier = full.index(stage)
        for n in gl.static_range(1, GROUPS + 1):
            mbarrier.expect(barrier, BYTES + n * ROWS * DEPTH * 2, pred=n == live)
        tma.async_copy_global_to_shared(wide, [n0, stage * DEPTH], barrier, wide_tiles.index(stage))
        tma.async_copy_global_to_shared(
            narrow, [n0 + WIDE, stage * DEPTH], barrier, narrow_tiles.index(stage)
        )
    wait_for_previous()
    stage = 0
    phase = 1
    for block in range(blocks):
        barrier = full.index(stage)
        if block >= STAGES:
            mbarrier.wait(empty.index(stage), phase)
            for n in gl.static_range(1, GROUPS + 1):
                mbarrier.expect(barrier, BYTES + n * ROWS * DEPTH * 2, pred=n == live)
            tma.async_copy_global_to_shared(
                wide, [n0, block * DEPTH], barrier, wide_tiles.index(stage)
            )
            tma.async_copy_global_to_shared(
                narrow, [n0 + WIDE, block * DEPTH], barrier, narrow_tiles.index(stage)
            )
        for group in gl.static_range(GROUPS):
            tma.async_copy_global_to_shared(
                x, [m0 + group * ROWS, block * DEPTH], barrier,
                x_tiles.index(stage * GROUPS + group), pred=group < live,
            )  # fmt: skip
        stage, phase = step(stage, phase, STAGES)


@gluon.jit
def _store(acc, out, row, rows, column, width, MMA: gl.constexpr, COLUMNS: gl.constexpr):
    m = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, MMA))
    n = column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, MMA))
    gl.store(
        out + m.to(gl.int64)[:, None] * width + n[None, :], acc.to(out.dtype.element_ty),
        mask=(m < rows)[:, None] & (n < width)[None, :],
    )  # fmt: skip


@gluon.jit
def _consume(
    out, rows, width, n0, m0, blocks, x_tiles, wide_tiles, narrow_tiles, full, empty,
    GROUP: gl.constexpr,
):  # fmt: skip
    MORE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16])
    LESS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, NARROW, 16])
    wait_for_previous()
    more = gl.zeros([ROWS, WIDE], gl.float32, MORE)
    less = gl.zeros([ROWS, NARROW], gl.float32, LESS)
    stage = 0
    phase = 0
    before = 0
    row = m0 + GROUP * ROWS
    if row < rows:
        for block in range(blocks):
            mbarrier.wait(full.index(stage), phase)
            mine = x_tiles.index(stage * GROUPS + GROUP)
            more = warpgroup_mma(mine, wide_tiles.index(stage).permute((1, 0)), more, is_async=True)
            less = warpgroup_mma(
                mine, narrow_tiles.index(stage).permute((1, 0)), less, is_async=True
            )
            more, less = warpgroup_mma_wait(2, deps=[more, less])
            if block > 0:
                mbarrier.arrive(empty.index(before))
            before = stage
            stage, phase = step(stage, phase, STAGES)
        more, less = warpgroup_mma_wait(0, deps=[more, less])
        _store(more, out, row, rows, n0, width, MORE, WIDE)
        _store(less, out, row, rows, n0 + WIDE, width, LESS, NARROW)
    else:
        for _ in range(blocks):
            mbarrier.wait(full.index(stage), phase)
            mbarrier.arrive(empty.index(stage))
            stage, phase = step(stage, phase, STAGES)


@gluon.jit(do_not_specialize=["rows"])
def head_rows(x, wide, narrow, out, rows, width, depth):
    """out [rows, width]; x, wide and narrow are descriptors of [64, 64], [128, 64] and [32, 64]
    boxes of the rows and, twice, of the weight. Program (160 columns, 192 rows)."""
    let_next_start()
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    x_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES * GROUPS, ROWS, DEPTH], SHARED)
    wide_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, WIDE, DEPTH], SHARED)
    narrow_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, NARROW, DEPTH], SHARED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=GROUPS)
    n0 = gl.program_id(0) * (WIDE + NARROW)
    m0 = gl.program_id(1) * GROUPS * ROWS
    live = gl.minimum((rows - m0 + ROWS - 1) // ROWS, GROUPS)
    blocks = depth // DEPTH
    gl.warp_specialize([
        (_consume, (
            out, rows, width, n0, m0, blocks, x_tiles, wide_tiles, narrow_tiles, full, empty,
            gl.constexpr(0))),
        (_consume, (
            out, rows, width, n0, m0, blocks, x_tiles, wide_tiles, narrow_tiles, full, empty,
            gl.constexpr(1))),
        (_consume, (
            out, rows, width, n0, m0, blocks, x_tiles, wide_tiles, narrow_tiles, full, empty,
            gl.constexpr(2))),
        (_produce, (
            x, wide, narrow, n0, m0, live, blocks, x_tiles, wide_tiles, narrow_tiles, full, empty)),
    ], [4, 4, 1], [160, 160, 24])  # fmt: skip


TILE = GROUPS.value * ROWS.value, WIDE.value + NARROW.value
PROGRAMS = 132


def fills(rows: int, width: int) -> bool:
    """Whether these rows are one tile's and the weight nearly one wave of tiles, which is what the
    form is for."""
    return rows <= TILE[0] and 4 * PROGRAMS <= 5 * -(-width // TILE[1]) <= 5 * PROGRAMS


def linear(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Fills out [R, N] with bf16 rows [R, K] times weight [N, K] transposed, K a multiple of 64."""
    rows, width = out.shape

    def boxes(tensor: torch.Tensor, height: int) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(tensor, [height, DEPTH.value], LAYOUT)

    head_rows[(-(-width // TILE[1]), -(-rows // TILE[0]))](
        boxes(x, ROWS.value), boxes(weight, WIDE.value), boxes(weight, NARROW.value), out, rows,
        width, x.shape[1], num_warps=4, **pdl(),
    )  # fmt: skip
