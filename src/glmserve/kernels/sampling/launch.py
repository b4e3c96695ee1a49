# SPDX-License-Identifier: Apache-2.0
"""Host side of the sampler's kernels: fixed grids, no read-back, scratch that cleans itself.

Everything may be captured in a CUDA graph; `Scratch` must then be large enough beforehand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from ..pdl import pdl
from . import kernel, limits
from .rows import SamplingRows

MAX_VOCABULARY = 1 << 18  # a histogram's element holds that many counts
_BLOCK, _GREEDY_BLOCK = 256, 512
_COUNT_BLOCK = 512
_PROGRAMS = 4224  # of one warp: what 132 multiprocessors hold at once
_EXACT = {"enable_fp_fusion": False}  # reference.py rounds after each operation


@dataclass(frozen=True)
class Scratch:
    """Of the kernels of one sampler, for up to `rows` rows; every kernel leaves it as it was."""

    best: Tensor  # [rows, a line] int64
    arrived: Tensor  # [rows, a line] int32
    sums: Tensor  # [3, rows, BINS] int64: upper bits, lower bits, lower bits of a second bin
    search: Tensor  # [rows, 4] int64

    @classmethod
    def make(cls, rows: int, device: torch.device) -> Self:
        return cls(
            torch.full(
                (rows, kernel.BEST_LINE.value),
                kernel.LOWEST.value,
                dtype=torch.int64,
                device=device,
            ),
            torch.zeros(rows, kernel.ARRIVED_LINE.value, dtype=torch.int32, device=device),
            torch.zeros(3, rows, limits.BINS.value, dtype=torch.int64, device=device),
            torch.zeros(rows, 4, dtype=torch.int64, device=device),
        )

    @property
    def rows(self) -> int:
        return len(self.best)


@dataclass(frozen=True)
class Shard:
    """Columns [0, width) of the logits are the ids [first, first + width); ids < valid exist."""

    first: int
    width: int
    valid: int


def unserved(dtype: torch.dtype, vocabulary: int) -> dict[str, object]:
    """Dimensions that the kernels do not serve."""
    wrong: dict[str, object] = {}
    if dtype != torch.float32:
        wrong["dtype"] = dtype
    if vocabulary > MAX_VOCABULARY:
        wrong["vocabulary"] = vocabulary
    return wrong


def _check(logits: Tensor, shard: Shard, scratch: Scratch, rows: SamplingRows | None) -> None:
    """What the kernels take for granted."""
    assert logits.is_contiguous() and logits.shape[1] == shard.width, (logits.shape, shard)
    assert len(logits) <= scratch.rows, (logits.shape, scratch.rows)
    for index in (rows.rows, rows.positions) if rows else ():
        assert index.shape == logits.shape[:1] and index.is_contiguous(), index.shape


def _split(rows: int, width: int, block: int) -> tuple[int, int]:
    """(programs a row, blocks a program)."""
    total = -(-width // block)
    blocks = -(-total // max(1, min(total, _PROGRAMS // max(rows, 1))))
    return -(-total // blocks), blocks


def greedy(logits: Tensor, shard: Shard, scratch: Scratch, decode: bool) -> Tensor:
    """Ids [R] int64, or, to be joined with other shards' by `join`, pairs."""
    _check(logits, shard, scratch, None)
    rows = len(logits)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return out
    splits, blocks = _split(rows, shard.width, _GREEDY_BLOCK)
    kernel.greedy[(splits, rows)](
        logits, scratch.best, scratch.arrived, out, shard.width, shard.first, shard.valid,
        splits, blocks, int(decode), _GREEDY_BLOCK, num_warps=1, **pdl(),
    )  # fmt: skip
    return out


def draw(
    logits: Tensor,
    rows: SamplingRows,
    shard: Shard,
    cuts: tuple[Tensor, Tensor] | None,
    scratch: Scratch,
    decode: bool,
) -> Tensor:
    """Ids [R] int64 or pairs; `cuts` as find_cuts returns them, None: no row has a limit."""
    _check(logits, shard, scratch, rows)
    count = len(logits)
    out = torch.empty(count, dtype=torch.int64, device=logits.device)
    if count == 0:
        return out
    offset = shard.first & 3
    splits, blocks = _split(count, shard.width + offset, _BLOCK)
    cut, largest = (scratch.arrived, scratch.best) if cuts is None else cuts
    kernel.draw[(splits, count)](
        logits, rows.temperature, rows.seeds, rows.rows, rows.positions, cut, largest,
        scratch.best, scratch.arrived, out,
        rows.temperature.stride(0), rows.seeds.stride(0), shard.width, offset, shard.first >> 2,
        shard.valid, splits, blocks, len(largest), count, int(decode),
        cuts is not None, _BLOCK, num_warps=1, maxnreg=64, **_EXACT, **pdl(),
    )  # fmt: skip
    return out


def join(pairs: Tensor) -> Tensor:
    """Pairs [N, R] of all shards -> ids [R] int64."""
    ranks, rows = pairs.shape
    out = torch.empty(rows, dtype=torch.int64, device=pairs.device)
    if rows:
        kernel.join_pairs[(-(-rows // 128),)](pairs, out, ranks, rows, 128, num_warps=1, **pdl())
    return out


def find_cuts(
    logits: Tensor,
    rows: SamplingRows,
    shard: Shard,
    scratch: Scratch,
    gather: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """Largest distance [R] int32 that may be drawn, and the pairs [N, R] it is counted from.

    gather: [...] -> [N, ...], the tensors of all ranks.
    """
    _check(logits, shard, scratch, rows)
    count, device = len(logits), logits.device
    splits, blocks = _split(count, shard.width, _COUNT_BLOCK)
    temperature, top_k, top_p, min_p = rows.temperature, rows.top_k, rows.top_p, rows.min_p
    place = shard.width, shard.first, shard.valid, blocks
    search = scratch.search
    t_stride, k_stride, p_stride, m_stride = (
        x.stride(0) for x in (temperature, top_k, top_p, min_p)
    )
    largest = gather(greedy(logits, shard, scratch, False))
    ranks = len(largest)

    def counted(which: int) -> Tensor:
        own = scratch.sums[which, :count]
        limits.count_steps[(splits, count)](
            logits, temperature, top_k, top_p, min_p, rows.rows, largest, search, own,
            t_stride, k_stride, p_stride, m_stride, *place, ranks, count,
            int(which == 0), _COUNT_BLOCK, num_warps=1, **_EXACT, **pdl(),
        )  # fmt: skip
        return gather(own)

    upper = counted(0)
    limits.choose_bin[(count,)](
        temperature, top_k, top_p, rows.rows, upper, search, t_stride, k_stride, p_stride,
        ranks, count, num_warps=4, **_EXACT, **pdl(),
    )  # fmt: skip
    lower = counted(1)
    limits.choose_step[(count,)](
        top_k, top_p, rows.rows, upper, lower, search, k_stride, p_stride, ranks, count,
        num_warps=4, **_EXACT, **pdl(),
    )  # fmt: skip
    last = counted(2)
    cuts = torch.empty(count, dtype=torch.int32, device=device)
    limits.finish_cuts[(count,)](
        temperature, top_k, top_p, min_p, rows.rows, last, search, cuts, *scratch.sums,
        t_stride, k_stride, p_stride, m_stride, ranks, count, num_warps=4, **_EXACT, **pdl(),
    )  # fmt: skip
    return cuts, largest
