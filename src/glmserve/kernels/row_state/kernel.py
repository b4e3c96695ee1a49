# SPDX-License-Identifier: Apache-2.0
"""The row state's operations in the Triton language: one program a sequence, or a copied row."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from ..pdl import pdl
from ..triton_common import let_next_start, wait_for_previous
from . import columns as c

_LENGTH = tl.constexpr(c.LENGTH)
_LAST_TOKEN = tl.constexpr(c.LAST_TOKEN)
_REMAINING = tl.constexpr(c.REMAINING)
_ACTIVE = tl.constexpr(c.ACTIVE)
_STOPS = tl.constexpr(c.STOPS)
_MAX_STOPS = tl.constexpr(c.MAX_STOPS)
_DRAFTS = tl.constexpr(c.DRAFTS)
_COUNT = tl.constexpr(c.COUNT)
_FLAGS = tl.constexpr(c.FLAGS)
_TOKENS = tl.constexpr(c.TOKENS)
_STOPPED = tl.constexpr(c.STOPPED)
_EXHAUSTED = tl.constexpr(c.EXHAUSTED)
_ROW = tl.constexpr(c.ROW)
_FIRST_ROW = tl.constexpr(c.FIRST_ROW)
_FIRST_DRAW = tl.constexpr(c.FIRST_DRAW)
_PROMPT_END = tl.constexpr(c.PROMPT_END)
_SEQUENCE = tl.constexpr(c.SEQUENCE_WIDTH)
_HEAD = tl.constexpr(c.SLOT_HEAD)
_BLOCK = 1024
_PLACES = 16  # covers the most drafts and the token after them: one form for any number


@triton.jit(do_not_specialize=["words"])
def scatter(x, index, rows, words, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    to = tl.load(index + n)
    tl.store(x + to * words + i, tl.load(rows + n * words + i, mask=i < words), mask=i < words)


@triton.jit(do_not_specialize=["width", "padding", "K"])
def place(
    table, sequences, tokens, positions, row_seq, next_positions, ahead, width, padding, K,
    J: tl.constexpr,
):  # fmt: skip
    let_next_start()
    wait_for_previous()
    sequence = sequences + tl.program_id(0) * _SEQUENCE
    first = tl.load(sequence + _FIRST_ROW)
    row = tl.load(sequence + _ROW)
    line = table + row * width
    live = tl.load(line + _ACTIVE) == 1
    decodes = (tl.load(sequence + _PROMPT_END) < 0) & (first >= 0)
    j = tl.arange(0, J)
    there = decodes & (j < K + 1)
    at = first + j
    guess = tl.load(line + _DRAFTS + j - 1, mask=(j > 0) & there & live, other=0)
    known = tl.where(j == 0, tl.load(line + _LAST_TOKEN), guess)
    position = tl.where(live, tl.load(line + _LENGTH) - 1, 0) + j
    tl.store(tokens + at, tl.where(live, known, 0), mask=there)
    tl.store(positions + at, position, mask=there)
    tl.store(next_positions + at, position + 1, mask=there)
    tl.store(row_seq + at, tl.where(live, row, padding) + j * 0, mask=there)
    if K > 0:
        draw = tl.load(sequence + _FIRST_DRAW) + j
        i = tl.arange(0, J)
        draft = tl.load(line + _DRAFTS + i, mask=(i < K) & live, other=-1)
        seen = tl.where(i[None, :] < j[:, None], draft[None, :], -1)
        places = ahead + draw[:, None] * K + i[None, :]
        tl.store(places, seen, mask=there[:, None] & (i < K)[None, :])


@triton.jit(do_not_specialize=["width", "padding", "K"])
def verify(
    table, sequences, draws, following, last, results, width, padding, K,
    J: tl.constexpr,
):  # fmt: skip
    let_next_start()
    wait_for_previous()
    s = tl.program_id(0).to(tl.int64)
    sequence = sequences + s * _SEQUENCE
    row = tl.load(sequence + _ROW)
    first = tl.load(sequence + _FIRST_ROW)
    prompt_end = tl.load(sequence + _PROMPT_END)
    final = prompt_end >= 0
    line = table + row * width
    j = tl.arange(0, J)
    there = (first >= 0) & tl.where(final, j < 1, j < K + 1)
    x = tl.load(draws + tl.load(sequence + _FIRST_DRAW) + j, mask=there, other=-1)
    tl.store(following + first + j, x, mask=there)
    draft = tl.load(line + _DRAFTS + j, mask=(j < K) & (prompt_end < 0), other=-2)
    accepted = tl.min(tl.where((x == draft) & (j < K), J, j), 0)
    stops = tl.load(line + _STOPS + tl.arange(0, _MAX_STOPS))
    stop = tl.sum(((x[:, None] == stops[None, :]) & there[:, None]).to(tl.int32), 1) > 0
    before = tl.min(tl.where(stop, j, J), 0)
    remaining = tl.load(line + _REMAINING)
    live = tl.where(final, 1, tl.load(line + _ACTIVE)) == 1
    live = live & (first >= 0) & (row < padding)
    length = tl.where(final, prompt_end, tl.load(line + _LENGTH))
    count = tl.minimum(tl.minimum(accepted, before) + 1, remaining.to(tl.int32))
    stopped = before < count
    exhausted = (count == remaining) & (before >= count)
    # Several programs may have the padding row, which is never live.
    tl.store(line + _LENGTH, length + count, mask=live)
    token = tl.sum(tl.where(j == count - 1, x, 0), 0)
    tl.store(line + _LAST_TOKEN, token, mask=live)
    tl.store(line + _REMAINING, remaining - count, mask=live)
    going_on = (before >= count) & (count != remaining)
    tl.store(line + _ACTIVE, going_on.to(tl.int64), mask=live)
    end = tl.where(live, tl.maximum(count - 1, 0), 0)
    tl.store(last + s, tl.maximum(first, 0) + end)
    out = results + s * (_TOKENS + 2 * K + 1)
    tl.store(out + _COUNT, tl.where(live, count, 0))
    flags = stopped.to(tl.int32) * _STOPPED + exhausted.to(tl.int32) * _EXHAUSTED
    tl.store(out + _FLAGS, tl.where(live, flags, 0))
    tl.store(out + _TOKENS + j, x.to(tl.int32), mask=j < K + 1)


@triton.jit(do_not_specialize=["count", "width", "column", "out_width", "out_column"])
def keep_drafts(
    table, sequences, tokens, results, count, width, column, out_width, out_column,
    BLOCK: tl.constexpr,
):  # fmt: skip
    let_next_start()
    wait_for_previous()
    s = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = s < count
    row = tl.load(sequences + s * _SEQUENCE + _ROW, mask=there, other=0)
    token = tl.load(tokens + s, mask=there, other=0)
    tl.store(table + row * width + column, token, mask=there)
    tl.store(results + s * out_width + out_column, token.to(tl.int32), mask=there)


@triton.jit(do_not_specialize=["words", "line_words"])
def send(results, lines, sent, words, line_words, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    let_next_start()
    wait_for_previous()
    number = tl.load(sent)
    line = lines + number % SLOTS * line_words
    for start in range(0, words, BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(line + _HEAD + i, tl.load(results + i, mask=i < words), mask=i < words)
    tl.debug_barrier()  # every thread has read the number
    tl.store(line, (number + 1).to(tl.int32))
    tl.store(sent, number + 1)


@triton.jit(do_not_specialize=["words", "table_width"])
def keep_ends(
    hidden, positions, row_seq, page_table, page_hidden, words, table_width,
    PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    let_next_start()
    wait_for_previous()
    r = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + r)
    if position % PAGE == PAGE - 1:
        line = page_table + tl.load(row_seq + r) * table_width
        page = tl.load(line + position // PAGE).to(tl.int64)
        for start in range(0, words, BLOCK):
            i = start + tl.arange(0, BLOCK)
            x = tl.load(hidden + r * words + i, mask=i < words)
            tl.store(page_hidden + page * words + i, x, mask=i < words)


def _words(x: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor as 32-bit words."""
    assert x.is_contiguous(), x.stride()
    return x.view(-1).view(torch.int32)


def _row_words(x: torch.Tensor) -> int:
    size = math.prod(x.shape[1:]) * x.element_size()
    assert size % 4 == 0, x.shape
    return size // 4


def put_rows(x: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> None:
    """As the operator; rows of whole words."""
    words = _row_words(x)
    if len(index):
        block = 32 if words <= 32 else _BLOCK
        scatter[(len(index), triton.cdiv(words, block))](
            _words(x), index, _words(rows), words, BLOCK=block, num_warps=1 if block == 32 else 4
        )


def place_rows(
    table: torch.Tensor,
    sequences: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    row_seq: torch.Tensor,
    next_positions: torch.Tensor,
    ahead: torch.Tensor,
) -> None:
    """As the operator."""
    drafts = ahead.shape[1]
    assert drafts < _PLACES, drafts
    if len(sequences):
        place[(len(sequences),)](
            table, sequences, tokens, positions, row_seq, next_positions, ahead,
            table.shape[1], len(table) - 1,
            drafts, J=_PLACES, num_warps=1, **pdl(),
        )  # fmt: skip


def verify_rows(
    table: torch.Tensor,
    sequences: torch.Tensor,
    draws: torch.Tensor,
    drafts: int,
    following: torch.Tensor,
    last: torch.Tensor,
    results: torch.Tensor,
) -> None:
    """As the operator."""
    assert drafts < _PLACES, drafts
    if len(sequences):
        verify[(len(sequences),)](
            table, sequences, draws, following, last, results, table.shape[1], len(table) - 1,
            drafts, J=_PLACES, num_warps=1, **pdl(),
        )  # fmt: skip


def store_drafts(
    table: torch.Tensor,
    sequences: torch.Tensor,
    tokens: torch.Tensor,
    number: int,
    drafts: int,
    results: torch.Tensor,
) -> None:
    """As the operator."""
    if len(sequences):
        keep_drafts[(triton.cdiv(len(sequences), 128),)](
            table, sequences, tokens, results, len(sequences), table.shape[1], c.DRAFTS + number,
            results.shape[1], c.TOKENS + drafts + 1 + number, BLOCK=128, num_warps=4, **pdl(),
        )  # fmt: skip


def send_results(results: torch.Tensor, slots: torch.Tensor, sent: torch.Tensor) -> None:
    """As the operator."""
    assert results.is_contiguous() and slots.is_contiguous(), (results.stride(), slots.stride())
    send[(1,)](
        results, slots, sent, results.numel(), slots.shape[1],
        SLOTS=len(slots), BLOCK=_BLOCK, num_warps=4, **pdl(),
    )  # fmt: skip


def keep_page_ends(
    hidden: torch.Tensor,
    positions: torch.Tensor,
    row_seq: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    page_hidden: torch.Tensor,
) -> None:
    """As the operator."""
    if len(positions):
        keep_ends[(len(positions),)](
            _words(hidden), positions, row_seq, page_table, _words(page_hidden),
            _row_words(hidden), page_table.shape[1], PAGE=page_size, BLOCK=_BLOCK,
            num_warps=4, **pdl(),
        )  # fmt: skip
