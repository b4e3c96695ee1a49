# SPDX-License-Identifier: Apache-2.0
"""Launches of top-k: how long rows are spread over programs, and where they meet."""

from __future__ import annotations

import functools

import torch
import triton

from ..pdl import pdl
from ..triton_common import INTERPRET
from . import many
from .few import BINS, ROOM
from .kernel import ALL, LIST, TALLY, WRITE, select_long, select_short

SHORT = 8192  # positions that one program holds in registers
CHUNK = 4096
MOST_ROWS = 512  # whose programs meet
MOST_CHUNKS = 128  # of a row
MOST_K = 8192


@functools.cache
def _counts(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(hist, state) of `select_long`; every launch leaves them as they were. Kept for good, as
    captured graphs know their addresses."""
    return (
        torch.zeros(MOST_ROWS, BINS.value, dtype=torch.int32, device=device),
        torch.zeros(MOST_ROWS, 8, dtype=torch.int32, device=device),
    )


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 132  # of an H200
    return torch.cuda.get_device_properties(device).multi_processor_count


def _meets(rows: int, width: int, device: torch.device) -> bool:
    """Whether a row's programs, one a SHORT positions, meet: where all rows' run at once, or two a
    row. Many programs have more to do than to wait (`many`)."""
    chunks = -(-width // SHORT)
    if chunks == 2:
        return rows <= MOST_ROWS
    return chunks <= MOST_CHUNKS and rows * chunks <= _multiprocessors(device)


def unserved(logits: torch.Tensor, k: int) -> dict[str, object]:
    """Dimensions that the kernels do not serve."""
    wrong: dict[str, object] = {}
    if k > MOST_K:
        wrong["k"] = k
    if logits.dtype != torch.float32:
        wrong["dtype"] = logits.dtype
    return wrong


def topk_select(
    logits: torch.Tensor, k: int, last: torch.Tensor | None, first: int
) -> torch.Tensor:
    """As the operator, for k up to MOST_K."""
    assert logits.is_contiguous(), logits.stride()
    rows, width = logits.shape
    k = min(k, width)
    device = logits.device
    out = torch.empty(rows, k, dtype=torch.int32, device=device)
    if last is None:
        last = torch.full((rows,), width - 1, dtype=torch.int64, device=device)
    if rows == 0:
        return out
    padded = 2048 if k <= 2048 else MOST_K
    if width <= SHORT:
        n, warps = (2048, 4) if width <= 2048 else (SHORT, 8)
        select_short[(rows,)](
            logits, last, out, width, first, k, WIDTH=padded, N=n,
            num_warps=warps, **pdl(),
        )  # fmt: skip
    elif _meets(rows, width, device):
        _meeting(logits, k, last, first, padded, out)
    else:
        _in_four(logits, k, last, first, padded, out)
    return out


def _meeting(
    logits: torch.Tensor, k: int, last: torch.Tensor, first: int, padded: int, out: torch.Tensor
) -> None:
    """Rows whose programs meet within one launch."""
    rows, width = logits.shape
    hist, state = _counts(logits.device)
    chunks = triton.cdiv(width, SHORT)
    listed = torch.empty(rows, ROOM.value, dtype=torch.int64, device=logits.device)
    over = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    # The interpreter runs programs one after the other, so that they cannot meet.
    for phase in (TALLY, LIST, WRITE) if INTERPRET.value else (ALL,):
        select_long[(chunks, rows)](
            logits, last, hist, state, listed, over, out, width, first, k,
            WIDTH=padded, N=SHORT, SAMPLE=2048, CHUNKS=MOST_CHUNKS, PHASE=phase.value, num_warps=16,
            **pdl(),
        )  # fmt: skip


def _in_four(
    logits: torch.Tensor, k: int, last: torch.Tensor, first: int, padded: int, out: torch.Tensor
) -> None:
    """Many long rows; see `many`."""
    rows, width = logits.shape
    chunks = triton.cdiv(width, CHUNK)
    of_row = 32 if chunks <= 32 else max(256, triton.next_power_of_2(chunks))
    least = torch.empty(rows, dtype=torch.int32, device=logits.device)
    counts = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    values = torch.empty(rows, SHORT, dtype=torch.int32, device=logits.device)
    positions = torch.empty_like(values)
    many.sample[(rows,)](
        logits, last, least, width, first, N=16384 if width > 1 << 17 else 4096, SHORT=SHORT,
        num_warps=16, **pdl(),
    )  # fmt: skip
    many.count_chunks[(chunks, rows)](
        logits, last, least, counts, width, first, chunks, CHUNK=CHUNK, num_warps=4, **pdl()
    )
    many.collect[(chunks, rows)](
        logits, last, least, counts, values, positions, width, first, chunks,
        CHUNKS=of_row, CHUNK=CHUNK, SHORT=SHORT, num_warps=8, maxnreg=64, **pdl(),
    )  # fmt: skip
    many.finish[(rows,)](
        logits, last, counts, values, positions, out, width, first, chunks,
        k, CHUNKS=of_row, WIDTH=padded, N=SHORT, WALK=2 * CHUNK, num_warps=8, **pdl(),
    )  # fmt: skip
