# SPDX-License-Identifier: Apache-2.0
"""What a step does to the rows' state, all of it on the device (DESIGN §3.1, §3.2).

`table` [lines, columns.width(k)] int64 has a line a device row and one more, the last, which is
the padding row's: places of padding, and of rows that have ended, compute as that sequence. A
decode step has B sequences of k + 1 places each; in a mixed step the last places of finished
prompts are drawn from too, one a sequence.
"""

from __future__ import annotations

import torch

from ..dispatch import use_kernel
from . import columns, reference

__all__ = ["columns", "keep_page_ends", "place_rows", "put_rows", "store_drafts", "verify_rows"]


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
    rows: torch.Tensor,
    drafts: int,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    row_seq: torch.Tensor,
    ahead: torch.Tensor,
) -> None:
    """Writes the places of B decoding sequences to the front of a step's rows.

    rows [B] int64 device rows -> place b * (k + 1) + j: tokens int64 (the last token, then the
    drafts), positions int64, row_seq int64 (the padding row where the row is not active), ahead
    [.., k] int64 (drafts of the step before the place, padded with -1).
    """
    assert ahead.shape[1] == drafts, (ahead.shape, drafts)
    if table.is_cuda and use_kernel("place_rows", "cuda", {}):
        from . import kernel

        return kernel.place_rows(table, rows, drafts, tokens, positions, row_seq, ahead)
    return reference.place_rows(table, rows, drafts, tokens, positions, row_seq, ahead)


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
    """Verifies the drafts of B sequences against their draws, and moves all S sequences on.

    A draft is accepted while the draw at its place equals it (DESIGN §3.2); the first draw that
    differs, or the one after the last draft, is the next token. Tokens are cut after a stop id and
    at the row's REMAINING. A prompt's one draw is its first token.

    rows         [S] int64 device rows: B decoding ones, then F whose prompts end in this step
    draws        [B (k + 1) + F] int64
    prompt_ends  [F] int64 lengths of those prompts; final_index [F] int64 their last rows' numbers
                 among the step's rows
    following    [.. step rows] int64: gets the draws (the token after each row)
    last         [S] int64: gets the number of each sequence's last confirmed row
    results      [S, columns.result_width(k)] int32: gets COUNT (0 = the row had ended), FLAGS and
                 TOKENS (all draws)
    """
    finals = len(final_index)
    assert prompt_ends.shape == final_index.shape, (prompt_ends.shape, final_index.shape)
    assert len(draws) == (len(rows) - finals) * (drafts + 1) + finals, (draws.shape, rows.shape)
    assert results.shape == (len(rows), columns.result_width(drafts)), results.shape
    operands = (table, rows, draws, drafts, prompt_ends, final_index, following, last, results)
    if table.is_cuda and use_kernel("verify_rows", "cuda", {}):
        from . import kernel

        return kernel.verify_rows(*operands)
    return reference.verify_rows(*operands)


def store_drafts(
    table: torch.Tensor,
    rows: torch.Tensor,
    tokens: torch.Tensor,
    number: int,
    drafts: int,
    results: torch.Tensor,
) -> None:
    """Keeps draft `number` of each sequence, tokens [S] int64, in its line and in the results."""
    assert 0 <= number < drafts, (number, drafts)
    if table.is_cuda and use_kernel("store_drafts", "cuda", {}):
        from . import kernel

        return kernel.store_drafts(table, rows, tokens, number, drafts, results)
    return reference.store_drafts(table, rows, tokens, number, drafts, results)


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
