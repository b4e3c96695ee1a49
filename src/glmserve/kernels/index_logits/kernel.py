# SPDX-License-Identifier: Apache-2.0
"""Index scores in the Triton language, one form for decode, verify and prefill rows. On a GPU 32
heads over fp8 pages, GLM's own, have a form in Gluon (`hopper`) with the same groups and stretches.

Rows are taken in groups that share each key tile: the rows of one request (1 to 9), or four rows
in a row whatever their requests. Groups lie one behind the other as a line of pages, and each of a
fixed number of CTAs scores an equal stretch of that line; how long it is stands in device memory.
Keys are on the M side of the products and two rows' heads (64 columns of GLM) on the N side. fp8
pages come through a tensor descriptor over the cache seen as rows of 128 B, 66 to a page.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ..pdl import pdl
from ..triton_common import dot, let_next_start, wait_for_previous

DIM, PAGE = 128, 64
GROUP = 4  # rows of a group where requests have any number of rows
CTAS = 264  # two for each multiprocessor of an H200; four times as many where groups differ
_MOST_GROUPS = 1024  # of one launch


@triton.jit
def _pair(query, weights, first_row, stop_row, R: tl.constexpr, HEADS: tl.constexpr):
    """Queries [HEADS R, 128] and head weights [HEADS R] of R rows; zeros from stop_row on."""
    c = tl.arange(0, HEADS * R)
    d = tl.arange(0, 128)
    there = first_row + c // HEADS < stop_row
    line = first_row * HEADS + c
    q = tl.load(query + line[:, None] * 128 + d[None, :], mask=there[:, None], other=0.0)
    return q, tl.load(weights + line, mask=there, other=0.0)


@triton.jit
def _score(
    keys, q, w, scale, out, width, position, first_row, lasts, first, allowed,
    R: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Stores the R rows' scores of one page."""
    s = dot(keys, q.T, tl.zeros([64, HEADS * R], tl.float32))
    s = tl.maximum(s, 0.0) * w[None, :]
    s = tl.sum(tl.reshape(s, [64, R, HEADS]), 2) * scale[:, None]
    r = tl.arange(0, R)
    at = position[:, None]
    s = tl.where((at <= lasts[None, :]) & (at >= first), s, float("-inf"))
    tl.store(out + (first_row + r).to(tl.int64)[None, :] * width + at, s, mask=allowed[None, :])


@triton.jit
def _rows(last, row_seq, first_row, stop_row, sequence, R: tl.constexpr):
    """What R rows see, and which of them belong to `sequence`."""
    r = first_row + tl.arange(0, R)
    there = r < stop_row
    lasts = tl.load(last + r, mask=there, other=-1).to(tl.int32)
    mine = tl.load(row_seq + r, mask=there, other=-1) == sequence
    return lasts, mine


@triton.jit
def _score_pages(
    query, weights, keys, cache, table, row_seq, last, out, width, first,
    first_row, stop_row, sequence, page_from, page_to,
    ROWS: tl.constexpr, HEADS: tl.constexpr, FP8: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Pages [page_from, page_to) of one sequence against the rows of a group that belong to it."""
    R: tl.constexpr = 1 if ROWS == 1 else 2
    t = tl.arange(0, 64)
    d = tl.arange(0, 128)
    scales = cache.to(tl.pointer_type(tl.float32))
    q0, w0 = _pair(query, weights, first_row, stop_row, R, HEADS)
    l0, m0 = _rows(last, row_seq, first_row, stop_row, sequence, R)
    if ROWS > 2:
        q1, w1 = _pair(query, weights, first_row + 2, stop_row, R, HEADS)
        l1, m1 = _rows(last, row_seq, first_row + 2, stop_row, sequence, R)
    if ROWS > 4:
        q2, w2 = _pair(query, weights, first_row + 4, stop_row, R, HEADS)
        l2, m2 = _rows(last, row_seq, first_row + 4, stop_row, sequence, R)
    if ROWS > 6:
        q3, w3 = _pair(query, weights, first_row + 6, stop_row, R, HEADS)
        l3, m3 = _rows(last, row_seq, first_row + 6, stop_row, sequence, R)
    if ROWS > 8:
        q4, w4 = _pair(query, weights, first_row + 8, stop_row, 1, HEADS)
        l4, m4 = _rows(last, row_seq, first_row + 8, stop_row, sequence, 1)
    page = tl.load(table + page_from)
    scale = tl.full([64], 1.0, tl.float32)
    if FP8:
        scale = tl.load(scales + page.to(tl.int64) * 2112 + 2048 + t)
    for p in tl.range(page_from, page_to, num_stages=STAGES):
        if FP8:
            k = keys.load([page * 66, 0])
        else:
            k = tl.load(cache + (page.to(tl.int64) * 64 + t)[:, None] * 128 + d[None, :])
        page = tl.load(table + tl.minimum(p + 1, page_to - 1))
        next_scale = scale
        if FP8:
            next_scale = tl.load(scales + page.to(tl.int64) * 2112 + 2048 + t)
        at = p * 64 + t
        _score(k, q0, w0, scale, out, width, at, first_row, l0, first, m0, R, HEADS)
        if ROWS > 2:
            _score(k, q1, w1, scale, out, width, at, first_row + 2, l1, first, m1, R, HEADS)
        if ROWS > 4:
            _score(k, q2, w2, scale, out, width, at, first_row + 4, l2, first, m2, R, HEADS)
        if ROWS > 6:
            _score(k, q3, w3, scale, out, width, at, first_row + 6, l3, first, m3, R, HEADS)
        if ROWS > 8:
            _score(k, q4, w4, scale, out, width, at, first_row + 8, l4, first, m4, 1, HEADS)
        scale = next_scale


@triton.jit(do_not_specialize=["rows"])
def count_pages(last, pages, rows, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """How many pages each group of any rows sees."""
    let_next_start()
    wait_for_previous()
    g = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    most = tl.zeros([BLOCK], tl.int32)
    for r in tl.static_range(ROWS):
        line = g * ROWS + r
        seen = tl.load(last + line, mask=line < rows, other=-1).to(tl.int32)
        most = tl.maximum(most, (seen + 64) // 64)
    tl.store(pages + g, most, mask=g * ROWS < rows)


@triton.jit
def _pages(last, pages, groups, ROWS: tl.constexpr, UNIFORM: tl.constexpr, GROUPS: tl.constexpr):
    """How many pages each group sees; a request's last row sees the most."""
    g = tl.arange(0, GROUPS)
    if UNIFORM:
        seen = tl.load(last + g * ROWS + ROWS - 1, mask=g < groups, other=-1).to(tl.int32)
        return (seen + 64) // 64
    else:
        return tl.load(pages + g, mask=g < groups, other=0)


@triton.jit(do_not_specialize=["rows", "groups", "table_width", "first"])
def score(
    query, weights, keys, cache, page_table, row_seq, last, group_pages, out,
    rows, groups, table_width, width, first,
    ROWS: tl.constexpr, HEADS: tl.constexpr, UNIFORM: tl.constexpr, GROUPS: tl.constexpr,
    FP8: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A CTA's stretch of all groups' pages. UNIFORM: each group is one request's ROWS rows."""
    let_next_start()
    wait_for_previous()
    all_pages = tl.sum(_pages(last, group_pages, groups, ROWS, UNIFORM, GROUPS), 0).to(tl.int64)
    me = tl.program_id(0)
    at = (all_pages * me // tl.num_programs(0)).to(tl.int32)
    stop = (all_pages * (me + 1) // tl.num_programs(0)).to(tl.int32)
    while at < stop:
        # Found anew for each group: kept over the page loop it would cost a third of the registers.
        g = tl.arange(0, GROUPS)
        pages = _pages(last, group_pages, groups, ROWS, UNIFORM, GROUPS)
        group = tl.sum((tl.cumsum(pages, 0) <= at).to(tl.int32), 0)
        before = tl.sum(tl.where(g < group, pages, 0), 0)
        here = tl.sum(tl.where(g == group, pages, 0), 0)
        page_from = at - before
        page_to = tl.minimum(stop - before, here)
        first_row = group * ROWS
        stop_row = tl.minimum(first_row + ROWS, rows)
        row = first_row
        while row < stop_row:
            sequence = tl.load(row_seq + row)
            following = stop_row
            segment_stop = page_to
            if not UNIFORM:
                following = row + 1
                while (following < stop_row) & (
                    tl.load(row_seq + tl.minimum(following, rows - 1)) == sequence
                ):
                    following += 1
                # Rows ascend in position: the last of a request's rows sees the most.
                reach = (tl.load(last + following - 1).to(tl.int32) + 64) // 64
                segment_stop = tl.minimum(page_to, reach)
            if page_from < segment_stop:
                _score_pages(
                    query, weights, keys, cache, page_table + sequence * table_width, row_seq,
                    last, out, width, first, first_row, stop_row, sequence, page_from,
                    segment_stop, ROWS, HEADS, FP8, STAGES,
                )  # fmt: skip
            row = following
        at = before + page_to


def unserved(query: torch.Tensor, index_cache: torch.Tensor, page_size: int) -> dict[str, object]:
    """Dimensions that the kernels do not serve."""
    wrong: dict[str, object] = {}
    if query.shape[1] not in (8, 16, 32):
        wrong["index heads"] = query.shape[1]
    if query.shape[2] != DIM:
        wrong["index dim"] = query.shape[2]
    if page_size != PAGE:
        wrong["page size"] = page_size
    if (query.dtype, index_cache.dtype) not in (
        (torch.float8_e4m3fn, torch.uint8),
        (torch.bfloat16, torch.bfloat16),
    ):
        wrong["index dtypes"] = (query.dtype, index_cache.dtype)
    return wrong


def index_logits(
    query: torch.Tensor,
    head_weights: torch.Tensor,
    index_cache: torch.Tensor,
    page_table: torch.Tensor,
    row_seq: torch.Tensor,
    last: torch.Tensor,
    first: int,
    max_context: int,
    rows_per_sequence: int | None,
    fill: bool,
) -> torch.Tensor:
    """As the operator. Without `fill`, places that a row does not see are written only inside the
    pages of its group."""
    assert query.is_contiguous(), query.stride()
    assert head_weights.is_contiguous(), head_weights.stride()
    assert index_cache.is_contiguous(), index_cache.stride()
    assert page_table.is_contiguous(), page_table.stride()
    rows = len(query)
    fp8 = query.dtype == torch.float8_e4m3fn
    make = torch.full if fill else lambda size, _, **options: torch.empty(size, **options)
    out = make((rows, max_context), -torch.inf, dtype=torch.float32, device=query.device)
    # A group's last page may reach beyond the columns; the table is then no wider than they are.
    assert max_context % PAGE == 0 or fill is True, max_context
    if max_context % PAGE:
        whole = max_context + PAGE - max_context % PAGE
        out = torch.full((rows, whole), -torch.inf, dtype=torch.float32, device=query.device)
    share = launch
    most = _MOST_GROUPS
    uniform = fp8 and rows_per_sequence is not None and rows_per_sequence <= 9
    group = rows_per_sequence if uniform and rows_per_sequence is not None else GROUP
    if fp8 and query.shape[1] == 32 and query.device.type != "cpu":
        from .hopper import launch as hopper

        share = hopper.launch
        if uniform:
            most = hopper.MOST_GROUPS
            group = group if group <= hopper.MOST_ROWS else 3  # nine rows: three groups
    for begin in range(0, rows, most * group):
        some = slice(begin, min(begin + most * group, rows))
        count = some.stop - begin
        groups = triton.cdiv(count, group)
        pages = None
        if not uniform:
            pages = torch.empty(groups, dtype=torch.int32, device=query.device)
            count_pages[(triton.cdiv(groups, 128),)](
                last[some], pages, count, ROWS=group, BLOCK=128, num_warps=4, **pdl()
            )
        share(
            query[some], head_weights[some], index_cache, page_table, row_seq[some], last[some],
            pages, out[some], groups, group, first,
        )  # fmt: skip
    return out[:, :max_context]


def launch(
    query: torch.Tensor,
    head_weights: torch.Tensor,
    index_cache: torch.Tensor,
    page_table: torch.Tensor,
    row_seq: torch.Tensor,
    last: torch.Tensor,
    group_pages: torch.Tensor | None,
    out: torch.Tensor,
    groups: int,
    group: int,
    first: int,
) -> None:
    """Fills out [R, width] for `groups` groups of `group` rows, each of one request where no
    `group_pages` are given."""
    fp8 = query.dtype == torch.float8_e4m3fn
    keys = index_cache
    if fp8:
        flat = index_cache.view(-1).view(torch.float8_e4m3fn).view(-1, DIM)
        keys = TensorDescriptor(flat, list(flat.shape), [DIM, 1], [PAGE, DIM])
    uniform = group_pages is None
    score[(CTAS if uniform else 4 * CTAS,)](
        query, head_weights, keys, index_cache, page_table, row_seq, last,
        last if uniform else group_pages, out, len(query), groups, page_table.shape[1],
        out.shape[1], first, ROWS=group, HEADS=query.shape[1], UNIFORM=uniform,
        GROUPS=16 if groups <= 16 else _MOST_GROUPS, FP8=fp8, STAGES=3 if fp8 else 2,
        num_warps=4, **pdl(),
    )  # fmt: skip
