# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
# ruff: noqa: RUF005 (the compiler knows no unpacking in tuples)
"""Index scores of 32 heads over fp8 pages on Hopper, in Gluon.

Groups of rows and a program's stretch of their pages are those of `kernel`. A warp of its own walks
ahead and brings pages and their scales by TMA. A warpgroup multiplies 64 keys by 64 columns, two
rows' heads (one row: two pages by its 32), and the next product runs while the sums of the last are
made: a thread adds up eight heads of four scores, two exchanges with its neighbours leave it one
score, and it stores that. The interpreter cannot run Gluon: there the plain form is used.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...gluon_common import let_next_start, step, wait_for_previous
from .sums import SCORES, exchanged, own_heads, own_heads_of_two

HEADS = gl.constexpr(32)


@gluon.jit
def _places(line, at, page_to):
    """Where pages `at` and `at` + 1 lie; the last again where there are no more."""
    first = gl.load(line + gl.minimum(at, page_to - 1))
    return first, gl.load(line + gl.minimum(at + 1, page_to - 1))


@gluon.jit
def _fetch_one(keys, scales, place, barrier, k_tile, s_tile):
    tma.async_copy_global_to_shared(keys, [place * 66, 0], barrier, k_tile)
    tma.async_copy_global_to_shared(scales, [place * 2112 + 2048], barrier, s_tile)


@gluon.jit
def _fetch(keys, scales, places, barrier, k_tiles, s_tiles, stage, PAGES: gl.constexpr):
    """Starts the copies of PAGES pages and their scales."""
    mbarrier.expect(barrier, PAGES * 8448)
    at = stage * PAGES
    _fetch_one(keys, scales, places[0], barrier, k_tiles.index(at), s_tiles.index(at))
    if PAGES == 2:
        _fetch_one(keys, scales, places[1], barrier, k_tiles.index(at + 1), s_tiles.index(at + 1))


@gluon.jit
def _queries(query, first_row, barrier, q_tiles, PAIRS: gl.constexpr, COLUMNS: gl.constexpr):
    mbarrier.expect(barrier, PAIRS * COLUMNS * 128)
    for pair in gl.static_range(PAIRS):
        tma.async_copy_global_to_shared(
            query, [first_row * HEADS + pair * COLUMNS, 0], barrier, q_tiles.index(pair)
        )


@gluon.jit
def _pages_of(last, group_pages, g, groups, ROWS: gl.constexpr, UNIFORM: gl.constexpr):
    """How many pages groups see; a request's last row sees the most."""
    if UNIFORM:
        seen = gl.load(last + g * ROWS + (ROWS - 1), mask=g < groups, other=-1).to(gl.int32)
        return (seen + 64) // 64
    else:
        return gl.load(group_pages + g, mask=g < groups, other=0)


@gluon.jit
def _bring(
    query, keys, scales, line, first_row, page_from, page_to, stage, phase, turn, k_tiles, s_tiles,
    q_tiles, full, empty, q_full, q_empty, ROWS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    PAGES: gl.constexpr = 2 if ROWS == 1 else 1
    PAIRS: gl.constexpr = (ROWS + 1) // 2
    COLUMNS: gl.constexpr = 32 if ROWS == 1 else 64
    places = _places(line, page_from, page_to)
    mbarrier.wait(q_empty, turn ^ 1)
    _queries(query, first_row, q_full, q_tiles, PAIRS, COLUMNS)
    for at in range(page_from, page_to, PAGES):
        coming = _places(line, at + PAGES, page_to)
        mbarrier.wait(empty.index(stage), phase ^ 1)
        _fetch(keys, scales, places, full.index(stage), k_tiles, s_tiles, stage, PAGES)
        places = coming
        stage, phase = step(stage, phase, STAGES)
    return stage, phase, turn ^ 1


@gluon.jit
def _multiply(
    weights, last, row_seq, out, width, first, rows, first_row, stop_row, sequence, page_from,
    page_to, stage, phase, turn, k_tiles, s_tiles, q_tiles, full, empty, q_full, q_empty,
    ROWS: gl.constexpr, UNIFORM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    SINGLE: gl.constexpr = ROWS == 1
    PAGES: gl.constexpr = 2 if SINGLE else 1
    PAIRS: gl.constexpr = (ROWS + 1) // 2
    COLUMNS: gl.constexpr = 32 if SINGLE else 64
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    BY_KEY: gl.constexpr = gl.SliceLayout(1, SCORES)
    BY_ROW: gl.constexpr = gl.SliceLayout(0, SCORES)
    c = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, MMA))
    u = gl.arange(0, 2, layout=BY_ROW)
    key = gl.arange(0, 64, layout=BY_KEY)
    head_weights = ()
    seen = ()
    lines = ()
    theirs = ()
    for pair in gl.static_range(PAIRS):
        place = first_row * HEADS + pair * COLUMNS + c
        head_weights = head_weights + (
            gl.load(weights + place, mask=place < rows * HEADS, other=0.0),
        )
        if SINGLE:
            row = first_row + u * 0
        else:
            row = first_row + pair * 2 + u
        there = row < stop_row
        seen = seen + (gl.load(last + row, mask=there, other=-1).to(gl.int32),)
        if UNIFORM:
            theirs = theirs + (there,)
        else:
            theirs = theirs + (gl.load(row_seq + row, mask=there, other=-1) == sequence,)
        lines = lines + (out + row.to(gl.int64)[None, :] * width + key[:, None],)
    none = gl.zeros([64, COLUMNS], gl.float32, MMA)
    mbarrier.wait(q_full, turn)
    for at in range(page_from, page_to, PAGES):
        mbarrier.wait(full.index(stage), phase)
        k0 = k_tiles.index(stage * PAGES)
        acc = warpgroup_mma(
            k0, q_tiles.index(0).permute((1, 0)), none, use_acc=False, is_async=True
        )
        position = at * 64 + key[:, None]
        scale = s_tiles.index(stage * PAGES).load(BY_KEY)[:, None]
        if SINGLE:
            k1 = k_tiles.index(stage * PAGES + 1)
            more = warpgroup_mma(
                k1, q_tiles.index(0).permute((1, 0)), none, use_acc=False, is_async=True
            )
            other = s_tiles.index(stage * PAGES + 1).load(BY_KEY)[:, None]
            scale = gl.where(u[None, :] == 1, other, scale)
            position = position + u[None, :] * 64
            acc = warpgroup_mma_wait(1, deps=[acc])
            a, b = own_heads(acc, head_weights[0])
            more = warpgroup_mma_wait(0, deps=[more])
            mbarrier.arrive(empty.index(stage))
            d, e = own_heads(more, head_weights[0])
            s = exchanged(a, b, d, e) * scale
            s = gl.where((position <= seen[0][None, :]) & (position >= first), s, float("-inf"))
            gl.store(lines[0] + (at + u[None, :]) * 64, s, mask=position < page_to * 64)
        else:
            for pair in gl.static_range(PAIRS):
                if pair + 1 < PAIRS:
                    following = warpgroup_mma(
                        k0, q_tiles.index(pair + 1).permute((1, 0)), none, use_acc=False,
                        is_async=True,
                    )  # fmt: skip
                    acc = warpgroup_mma_wait(1, deps=[acc])
                else:
                    acc = warpgroup_mma_wait(0, deps=[acc])
                    mbarrier.arrive(empty.index(stage))
                a, b, d, e = own_heads_of_two(acc, head_weights[pair])
                s = exchanged(a, b, d, e) * scale
                unseen = (position > seen[pair][None, :]) | (position < first)
                s = gl.where(unseen, float("-inf"), s)
                gl.store(lines[pair] + at * 64, s, mask=theirs[pair][None, :])
                if pair + 1 < PAIRS:
                    acc = following
        stage, phase = step(stage, phase, STAGES)
    mbarrier.arrive(q_empty)
    return stage, phase, turn ^ 1


@gluon.jit
def _walk(
    query, weights, keys, scales, page_table, row_seq, last, group_pages, out, rows, groups,
    table_width, width, first, page, group, left, here, first_sequence, k_tiles, s_tiles, q_tiles,
    full, empty, q_full, q_empty,
    BRINGS: gl.constexpr, ROWS: gl.constexpr, UNIFORM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """All segments of a program's stretch, for either side."""
    stage = 0
    phase = 0
    turn = 0
    while left > 0:
        page_to = page + gl.minimum(left, here - page)
        first_row = group * ROWS
        stop_row = gl.minimum(first_row + ROWS, rows)
        row = first_row
        while row < stop_row:
            sequence = first_sequence
            if row > 0:
                sequence = gl.load(row_seq + row)
            following = stop_row
            reach = page_to
            if not UNIFORM:
                following = row + 1
                while (following < stop_row) & (
                    gl.load(row_seq + gl.minimum(following, rows - 1)) == sequence
                ):
                    following += 1
                # Rows ascend in position: the last of a request's rows sees the most.
                reach = (gl.load(last + following - 1).to(gl.int32) + 64) // 64
                reach = gl.minimum(page_to, reach)
            if page < reach:
                if BRINGS:
                    stage, phase, turn = _bring(
                        query, keys, scales, page_table + sequence * table_width, first_row, page,
                        reach, stage, phase, turn, k_tiles, s_tiles, q_tiles, full, empty, q_full,
                        q_empty, ROWS, STAGES,
                    )  # fmt: skip
                else:
                    stage, phase, turn = _multiply(
                        weights, last, row_seq, out, width, first, rows, first_row, stop_row,
                        sequence, page, reach, stage, phase, turn, k_tiles, s_tiles, q_tiles, full,
                        empty, q_full, q_empty, ROWS, UNIFORM, STAGES,
                    )  # fmt: skip
            row = following
        left -= page_to - page
        page = 0
        group += 1
        here = 0
        if group < groups:
            here = _pages_of(last, group_pages, group, groups, ROWS, UNIFORM)


@gluon.jit
def _share(pages, me, count):
    """(the first of so many pages that are mine, how many are)."""
    each = pages // count
    more = pages % count
    return me * each + gl.minimum(me, more), each + (me < more).to(gl.int32)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit(do_not_specialize=["rows", "groups", "table_width", "first"])
def score(
    query, weights, keys, scales, page_table, row_seq, last, group_pages, out,
    rows, groups, table_width, width, first,
    ROWS: gl.constexpr, UNIFORM: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A program's stretch of all groups' pages. UNIFORM: each group is one request's ROWS rows."""
    let_next_start()
    PAGES: gl.constexpr = 2 if ROWS == 1 else 1
    PAIRS: gl.constexpr = (ROWS + 1) // 2
    COLUMNS: gl.constexpr = 32 if ROWS == 1 else 64
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    LINES: gl.constexpr = gl.NVMMASharedLayout(0, 32, 1)
    k_tiles = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * PAGES, 64, 128], SHARED)
    s_tiles = gl.allocate_shared_memory(gl.float32, [STAGES * PAGES, 64], LINES)
    q_tiles = gl.allocate_shared_memory(gl.float8e4nv, [PAIRS, COLUMNS, 128], SHARED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=1)
    wait_for_previous()
    # Asked for before it is known whether it is the first row's request that counts.
    first_sequence = gl.load(row_seq)
    me = gl.program_id(0)
    count = gl.num_programs(0)
    if groups == 1:
        here = _pages_of(last, group_pages, 0, groups, ROWS, UNIFORM)
        page, left = _share(here, me, count)
        group = 0
    else:
        ALL: gl.constexpr = gl.BlockedLayout([GROUPS // 32], [32], [4], [0])
        g = gl.arange(0, GROUPS, layout=ALL)
        pages = _pages_of(last, group_pages, g, groups, ROWS, UNIFORM)
        upto = gl.associative_scan(pages, 0, _add)
        at, left = _share(gl.sum(pages, 0), me, count)
        group = gl.sum((upto <= at).to(gl.int32), 0)
        page = at - gl.sum(gl.where(g < group, pages, 0), 0)
        here = gl.sum(gl.where(g == group, pages, 0), 0)
    gl.warp_specialize([
        (_walk, (
            query, weights, keys, scales, page_table, row_seq, last, group_pages, out, rows, groups,
            table_width, width, first, page, group, left, here, first_sequence, k_tiles, s_tiles,
            q_tiles, full, empty, q_full, q_empty, False, ROWS, UNIFORM, STAGES)),
        (_walk, (
            query, weights, keys, scales, page_table, row_seq, last, group_pages, out, rows, groups,
            table_width, width, first, page, group, left, here, first_sequence, k_tiles, s_tiles,
            q_tiles, full, empty, q_full, q_empty, True, ROWS, UNIFORM, STAGES)),
    ], [1], [24])  # fmt: skip
