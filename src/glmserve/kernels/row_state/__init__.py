# SPDX-License-Identifier: Apache-2.0
"""What a step does to the rows' state, all of it on the device (DESIGN §3.1, §3.2).

`table` [lines, columns.width(k)] int64 has a line a device row and one more, the last, which is
the padding row's: places of padding, and of rows that have ended, compute as that sequence.
`sequences` [S, columns.SEQUENCE_WIDTH] int64 says which sequences a step draws for and where their
rows are: k + 1 places of a decoding one, the last row of a prompt that ends.
"""

from __future__ import annotations

import torch

from ..dispatch import use_kernel
from . import columns, reference

__all__ = [
    "columns",
    "keep_page_ends",
    "place_rows",
    "put_rows",
    "send_results",
    "store_drafts",
    "verify_rows",
]


def put_rows(x: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> None:
    """x[index[n]] = rows[n]: x [R, ...], index [N] int64 (distinct), rows [N, ...] like x."""
    assert index.shape == rows.shape[:1], (index.shape, rows.shape)
    assert x.shape[1:] == rows.shape[1:], (x.shape, rows.shape)
    assert x.dtype == rows.dtype, (x.dtype, rows.dtype)
    if x.is_cuda and use_kernel("put_rows", "cuda", {}):
        from . import kernel

        return kernel.put_rows(x, index, rows)
    return reference.put_rows(x, index, rows)


def place_rows(
    table: torch.Tensor,
    sequences: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    row_seq: torch.Tensor,
    next_positions: torch.Tensor,
    ahead: torch.Tensor,
) -> None:
    """Writes the places of the decoding sequences among a step's rows.

    Of [R] int64 each: tokens (the last token, then the drafts), positions, row_seq (the padding row
    where the row is not active), next_positions (positions + 1); and ahead [M, k] int64 (drafts of
    the step before the place, padded with -1).
    """
    assert sequences.shape[1] == columns.SEQUENCE_WIDTH, sequences.shape
    operands = (table, sequences, tokens, positions, row_seq, next_positions, ahead)
    if table.is_cuda and use_kernel("place_rows", "cuda", {}):
        from . import kernel

        return kernel.place_rows(*operands)
    return reference.place_rows(*operands)


def verify_rows(
    table: torch.Tensor,
    sequences: torch.Tensor,
    draws: torch.Tensor,
    drafts: int,
    following: torch.Tensor,
    last: torch.Tensor,
    results: torch.Tensor,
) -> None:
    """Verifies the drafts of the sequences against their draws, and moves the sequences on.

    A draft is accepted while the draw at its place equals it (DESIGN §3.2); the first draw that
    differs, or the one after the last draft, is the next token. Tokens are cut after a stop id and
    at the row's REMAINING. A prompt's one draw is its first token.

    draws      [M] int64
    following  [R] int64: gets the draws (the token after each row)
    last       [S] int64: gets the number of each sequence's last confirmed row
    results    [S, columns.result_width(k)] int32: gets COUNT (0 = the row had ended), FLAGS and
               TOKENS (all draws)
    """
    assert results.shape == (len(sequences), columns.result_width(drafts)), results.shape
    operands = (table, sequences, draws, drafts, following, last, results)
    if table.is_cuda and use_kernel("verify_rows", "cuda", {}):
        from . import kernel

        return kernel.verify_rows(*operands)
    return reference.verify_rows(*operands)


def store_drafts(
    table: torch.Tensor,
    sequences: torch.Tensor,
    tokens: torch.Tensor,
    number: int,
    drafts: int,
    results: torch.Tensor,
) -> None:
    """Keeps draft `number` of each sequence, tokens [S] int64, in its line and in the results."""
    assert 0 <= number < drafts, (number, drafts)
    operands = (table, sequences, tokens, number, drafts, results)
    if table.is_cuda and use_kernel("store_drafts", "cuda", {}):
        from . import kernel

        return kernel.store_drafts(*operands)
    return reference.store_drafts(*operands)


def send_results(results: torch.Tensor, slots: torch.Tensor, sent: torch.Tensor) -> None:
    """Writes a step's results to the slot whose turn it is, and counts it.

    results  [S, columns.result_width(k)] int32
    slots    [slots, at least columns.SLOT_HEAD + S * width] int32; on CUDA pinned memory of the
             host, which the device writes itself
    sent     [1] int64 on the device: results sent so far; the slot is its remainder
    """
    assert columns.SLOT_HEAD + results.numel() <= slots.shape[1], (results.shape, slots.shape)
    if results.is_cuda and use_kernel("send_results", "cuda", {}):
        from . import kernel

        return kernel.send_results(results, slots, sent)
    return reference.send_results(results, slots, sent)


def keep_page_ends(
    hidden: torch.Tensor,
    positions: torch.Tensor,
    row_seq: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    page_hidden: torch.Tensor,
) -> None:
    """page_hidden[page] = hidden[r] of the rows r that stand at a page's last slot.

    hidden [R, D], positions and row_seq [R] int64, page_table [S, P] int32, page_hidden [pages, D]
    """
    operands = (hidden, positions, row_seq, page_table, page_size, page_hidden)
    if hidden.is_cuda and use_kernel("keep_page_ends", "cuda", {}):
        from . import kernel

        return kernel.keep_page_ends(*operands)
    return reference.keep_page_ends(*operands)
