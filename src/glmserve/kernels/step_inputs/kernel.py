# SPDX-License-Identifier: Apache-2.0
"""The step's rotary table, limits and slots in the Triton language, one launch a pass.

The angle is rounded to fp32 as in the reference; only its reduction to one turn is done in fp64,
because positions reach a million turns and the GPU's sine is good near zero alone.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl

from ..pdl import pdl
from ..triton_common import divide, let_next_start, wait_for_previous
from .reference import StepInputs

_TURN = tl.constexpr(2 * math.pi)


@triton.jit(do_not_specialize=["rows", "table_width", "ahead", "shift"])
def describe_rows(
    positions, row_seq, page_table, period, table, last, slots,
    rows, table_width, ahead, shift,
    HALF: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    let_next_start()
    wait_for_previous()
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    i = tl.arange(0, HALF)
    there = r < rows
    place = tl.load(positions + r, mask=there, other=0) + ahead
    p = place.to(tl.float32)
    angle = divide(p[:, None] + tl.zeros([BLOCK, HALF], tl.float32), tl.load(period + i)[None, :])
    wide = angle.to(tl.float64)
    wide = wide - tl.floor(wide / _TURN + 0.5) * _TURN
    near = wide.to(tl.float32)
    at = table + (r[:, None] * HALF + i[None, :]) * 2
    tl.store(at, tl.cos(near), mask=there[:, None])
    tl.store(at + 1, tl.sin(near), mask=there[:, None])
    own = place + shift
    tl.store(last + r, own, mask=there)
    line = tl.load(row_seq + r, mask=there, other=0) * table_width
    page = tl.load(page_table + line + own // PAGE, mask=there, other=0)
    tl.store(slots + r, page * PAGE + (own % PAGE).to(tl.int32), mask=there)


@functools.cache
def _periods(rope_dim: int, theta: float, device: torch.device) -> torch.Tensor:
    """theta^(2i / d) as the reference has it."""
    pair = torch.arange(0, rope_dim, 2, dtype=torch.float32, device=device)
    return theta ** (pair / rope_dim)


def unserved(rope_dim: int, page_size: int, dtype: torch.dtype) -> dict[str, object]:
    """Dimensions that the kernel does not serve."""
    wrong: dict[str, object] = {}
    if rope_dim & (rope_dim - 1):
        wrong["rope dim"] = rope_dim
    if page_size & (page_size - 1):
        wrong["page size"] = page_size
    if dtype == torch.float64:
        wrong["dtype"] = dtype
    return wrong


def step_inputs(
    positions: torch.Tensor,
    row_seq: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    ahead: int,
    shift: int,
    rope_dim: int,
    theta: float,
) -> StepInputs:
    """As the operator; the table is fp32, slots are int32."""
    assert positions.is_contiguous(), positions.stride()
    assert row_seq.is_contiguous(), row_seq.stride()
    assert page_table.is_contiguous(), page_table.stride()
    rows, half, device = len(positions), rope_dim // 2, positions.device
    table = torch.empty(rows, half, 2, dtype=torch.float32, device=device)
    last = torch.empty(rows, dtype=torch.int64, device=device)
    slots = torch.empty(rows, dtype=torch.int32, device=device)
    if rows:
        describe_rows[(triton.cdiv(rows, 8),)](
            positions, row_seq, page_table, _periods(rope_dim, theta, device), table, last, slots,
            rows, page_table.shape[1], ahead, shift, HALF=half, PAGE=page_size, BLOCK=8,
            num_warps=2, **pdl(),
        )  # fmt: skip
    return StepInputs(table, last, slots)
