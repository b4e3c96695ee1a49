# SPDX-License-Identifier: Apache-2.0
"""What a step does to the rows' state. Each of it takes what a launch takes: the profile of a whole
step (`step_profile.py`) has their times, so nothing is timed here."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from bench.registry import Case
from glmserve.kernels.row_state import columns, kernel

ROWS, SEQUENCES, DRAFTS, HIDDEN, PAGE = 64, 8, 5, 6144, 64


def launches(device: torch.device) -> Iterator[tuple[str, Callable[[], object]]]:
    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    table = empty(ROWS + 1, columns.width(DRAFTS))
    sequences = empty(SEQUENCES, columns.SEQUENCE_WIDTH)
    step = [empty(ROWS) for _ in range(4)]
    results = empty(SEQUENCES, columns.result_width(DRAFTS), dtype=torch.int32)
    hidden = empty(ROWS, HIDDEN, dtype=torch.bfloat16)
    pages = empty(1024, HIDDEN, dtype=torch.bfloat16)
    page_table = empty(ROWS + 1, 2048, dtype=torch.int32)
    yield "place", lambda: kernel.place_rows(table, sequences, *step, empty(ROWS, DRAFTS))
    yield (
        "verify",
        lambda: kernel.verify_rows(
            table, sequences, step[0], DRAFTS, step[1], empty(SEQUENCES), results
        ),
    )
    yield (
        "keep drafts",
        lambda: kernel.store_drafts(table, sequences, empty(SEQUENCES), 0, DRAFTS, results),
    )
    slots, sent = empty(8, 4096, dtype=torch.int32), empty(1)
    yield "send results", lambda: kernel.send_results(results, slots, sent)
    yield (
        "keep page ends",
        lambda: kernel.keep_page_ends(hidden, step[0], step[1], page_table, PAGE, pages),
    )
    yield (
        "put short rows",
        lambda: kernel.put_rows(table[:, :8].contiguous(), step[0], table[:ROWS, :8].contiguous()),
    )
    yield "put rows", lambda: kernel.put_rows(pages, step[0], hidden)


def cases() -> Iterator[Case]:
    return iter(())
