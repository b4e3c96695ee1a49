# SPDX-License-Identifier: Apache-2.0
"""Host side of the layer boundary: the shape of the shared memory and which kernel runs.

Who allocates the memory and exchanges addresses is not its business (`parallel`): it takes two
tables of addresses, one entry a rank.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from ..pdl import pdl
from ..quantise.launch import empty_rows
from ..residual_norm import Normed
from . import kernel

MAX_PROGRAMS = 128  # one a multiprocessor: all are resident at once
ONE_SHOT_BYTES = 4 << 20  # read from peers: above it two-shot, which reads 2 / N of that, pays


class PeerMemory(NamedTuple):
    """One rank's view of the group's shared memory."""

    rank: int
    size: int
    buffers: torch.Tensor  # [size] int64, addresses of [4, capacity] bf16
    signals: torch.Tensor  # [size] int64, addresses of flags [2 * MAX_PROGRAMS, size] int32
    state: torch.Tensor  # [2] int32 of this rank alone, zero at first
    capacity: int  # elements of a part: rows * width that one launch can carry


def shared_bytes(capacity: int, size: int) -> tuple[int, int]:
    """(bytes of a buffer, bytes of the flags) that each rank provides, zeroed."""
    return 4 * capacity * 2, 2 * MAX_PROGRAMS * size * 4


def takes_two_shots(size: int, rows: int, width: int) -> bool:
    """Which form `boundary` chooses. Between two ranks both move the same bytes."""
    return size > 2 and rows * width * 2 * (size - 1) > ONE_SHOT_BYTES


def boundary(
    memory: PeerMemory,
    partial: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    quantised: bool = False,
    two_shot: bool | None = None,
    phase: int = 0,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[Normed, torch.Tensor]:
    """(normed, residual + sum of partials), [R, D] bf16, bit-identical on every rank.

    residual None stands for zeros. phase: 0 for a whole launch; 1..3 one of its parts (2 exists in
    two-shot only), for the interpreter, which cannot run ranks at the same time.
    """
    rows, width = partial.shape
    assert rows * width <= memory.capacity, (rows, width, memory.capacity)
    assert 4 * memory.capacity < 1 << 31, memory.capacity  # places are int32
    assert partial.is_contiguous(), partial.stride()
    if two_shot is None:
        two_shot = takes_two_shots(memory.size, rows, width)
    normed, total = out or (torch.empty_like(partial), torch.empty_like(partial))
    rows8 = empty_rows(rows, width, partial.device) if quantised else None
    # Whole rounds of rows: the programs that have one more would be waited for.
    programs = -(-rows // max(1, -(-rows // MAX_PROGRAMS)))
    function = kernel.two_shot if two_shot else kernel.one_shot
    function[(programs,)](
        partial, memory.buffers, memory.signals, memory.state,
        partial if residual is None else residual, weight, normed, total,
        normed if rows8 is None else rows8.values, weight if rows8 is None else rows8.scales,
        rows, width, memory.capacity, eps, memory.rank, memory.size,
        triton.next_power_of_2(-(-width // 128)), residual is not None, quantised, phase,
        num_warps=16, **pdl(),
    )  # fmt: skip
    return Normed(normed, rows8), total
