# SPDX-License-Identifier: Apache-2.0
"""The row state's operations in the Triton language: one program a sequence, or a copied row."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from ..triton_common import INTERPRET  # noqa: F401 (chooses the interpreter before tl is used)
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
_BLOCK = 1024


@triton.jit(do_not_specialize=["words"])
def scatter(x, index, rows, words, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    to = tl.load(index + n)
    tl.store(x + to * words + i, tl.load(rows + n * words + i, mask=i < words), mask=i < words)


@triton.jit(do_not_specialize=["width", "padding"])
def place(
    table, rows, tokens, positions, row_seq, ahead, width, padding,
    K: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + b)
    line = table + row * width
    live = tl.load(line + _ACTIVE) == 1
    j = tl.arange(0, J)
    there = j < K + 1
    at = b * (K + 1) + j
    guess = tl.load(line + _DRAFTS + j - 1, mask=(j > 0) & there & live, other=0)
    first = tl.load(line + _LAST_TOKEN)
    start = tl.load(line + _LENGTH) - 1
    tl.store(tokens + at, tl.where(live, tl.where(j == 0, first, guess), 0), mask=there)
    tl.store(positions + at, tl.where(live, start, 0) + j, mask=there)
    tl.store(row_seq + at, tl.where(live, row, padding) + j * 0, mask=there)
    if K > 0:
        i = tl.arange(0, J)
        draft = tl.load(line + _DRAFTS + i, mask=(i < K) & live, other=-1)
        seen = tl.where(i[None, :] < j[:, None], draft[None, :], -1)
        tl.store(ahead + at[:, None] * K + i[None, :], seen, mask=there[:, None] & (i < K)[None, :])


@triton.jit(do_not_specialize=["width", "decoding"])
def verify(
    table, rows, draws, prompt_ends, final_index, following, last, results, width, decoding,
    K: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0).to(tl.int64)
    decodes = s < decoding
    final = tl.maximum(s - decoding, 0)
    line = table + tl.load(rows + s) * width
    j = tl.arange(0, J)
    there = tl.where(decodes, j < K + 1, j < 1)
    first = tl.where(decodes, s * (K + 1), decoding * (K + 1) + final)
    x = tl.load(draws + first + j, mask=there, other=-1)
    number = tl.load(final_index + final, mask=s >= decoding, other=0)
    tl.store(following + tl.where(decodes, first, number) + j, x, mask=there)
    draft = tl.load(line + _DRAFTS + j, mask=decodes & (j < K), other=-2)
    accepted = tl.min(tl.where((x == draft) & (j < K), J, j), 0)
    stops = tl.load(line + _STOPS + tl.arange(0, _MAX_STOPS))
    stop = tl.sum(((x[:, None] == stops[None, :]) & there[:, None]).to(tl.int32), 1) > 0
    before = tl.min(tl.where(stop, j, J), 0)
    remaining = tl.load(line + _REMAINING)
    live = tl.where(decodes, tl.load(line + _ACTIVE), 1) == 1
    length = tl.load(line + _LENGTH)
    length = tl.where(decodes, length, tl.load(prompt_ends + final, mask=s >= decoding, other=0))
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
    tl.store(last + s, tl.where(decodes, first + end, number))
    out = results + s * (_TOKENS + 2 * K + 1)
    tl.store(out + _COUNT, tl.where(live, count, 0))
    flags = stopped.to(tl.int32) * _STOPPED + exhausted.to(tl.int32) * _EXHAUSTED
    tl.store(out + _FLAGS, tl.where(live, flags, 0))
    tl.store(out + _TOKENS + j, x.to(tl.int32), mask=j < K + 1)


@triton.jit(do_not_specialize=["sequences", "width", "column", "out_width", "out_column"])
def keep_drafts(
    table, rows, tokens, results, sequences, width, column, out_width, out_column,
    BLOCK: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = s < sequences
    row = tl.load(rows + s, mask=there, other=0)
    token = tl.load(tokens + s, mask=there, other=0)
    tl.store(table + row * width + column, token, mask=there)
    tl.store(results + s * out_width + out_column, token.to(tl.int32), mask=there)


@triton.jit(do_not_specialize=["words", "table_width"])
def keep_ends(
    hidden, positions, row_seq, page_table, page_hidden, words, table_width,
    PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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
    rows: torch.Tensor,
    drafts: int,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    row_seq: torch.Tensor,
    ahead: torch.Tensor,
) -> None:
    """As the operator."""
    if len(rows):
        place[(len(rows),)](
            table, rows, tokens, positions, row_seq, ahead, table.shape[1], len(table) - 1,
            K=drafts, J=triton.next_power_of_2(drafts + 1), num_warps=1,
        )  # fmt: skip


def verify_rows(
    table: torch.Tensor,
    rows: torch.Tensor,
    draws: torch.Tensor,
    drafts: int,
    prompt_ends: torch.Tensor,
    final_index: torch.Tensor,
    following: torch.Tensor,
    last: torch.Tensor,
    results: torch.Tensor,
) -> None:
    """As the operator."""
    if len(rows):
        verify[(len(rows),)](
            table, rows, draws, prompt_ends, final_index, following, last, results,
            table.shape[1], len(rows) - len(final_index),
            K=drafts, J=triton.next_power_of_2(drafts + 1), num_warps=1,
        )  # fmt: skip


def store_drafts(
    table: torch.Tensor,
    rows: torch.Tensor,
    tokens: torch.Tensor,
    number: int,
    drafts: int,
    results: torch.Tensor,
) -> None:
    """As the operator."""
    if len(rows):
        keep_drafts[(triton.cdiv(len(rows), 128),)](
            table, rows, tokens, results, len(rows), table.shape[1], c.DRAFTS + number,
            results.shape[1], c.TOKENS + drafts + 1 + number, BLOCK=128, num_warps=4,
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
            _row_words(hidden), page_table.shape[1], PAGE=page_size, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
