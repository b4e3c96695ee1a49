# SPDX-License-Identifier: Apache-2.0
"""The step's rotary table in the Triton language.

The angle is rounded to fp32 as in the reference; only its reduction to one turn is done in fp64,
because positions reach a million turns and the GPU's sine is good near zero alone.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl

from ..triton_common import divide

_TURN = tl.constexpr(2 * math.pi)


@triton.jit(do_not_specialize=["rows"])
def angles(positions, period, table, rows, HALF: tl.constexpr, BLOCK: tl.constexpr):
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    i = tl.arange(0, HALF)
    there = (r < rows)[:, None]
    p = tl.load(positions + r, mask=r < rows, other=0).to(tl.float32)
    angle = divide(p[:, None] + tl.zeros([BLOCK, HALF], tl.float32), tl.load(period + i)[None, :])
    wide = angle.to(tl.float64)
    wide = wide - tl.floor(wide / _TURN + 0.5) * _TURN
    near = wide.to(tl.float32)
    at = table + (r[:, None] * HALF + i[None, :]) * 2
    tl.store(at, tl.cos(near), mask=there)
    tl.store(at + 1, tl.sin(near), mask=there)


@functools.cache
def _periods(rope_dim: int, theta: float, device: torch.device) -> torch.Tensor:
    """theta^(2i / d) as the reference has it."""
    pair = torch.arange(0, rope_dim, 2, dtype=torch.float32, device=device)
    return theta ** (pair / rope_dim)


def unserved(rope_dim: int, dtype: torch.dtype) -> dict[str, object]:
    """Dimensions that the kernel does not serve."""
    wrong: dict[str, object] = {}
    if rope_dim & (rope_dim - 1):
        wrong["rope dim"] = rope_dim
    if dtype == torch.float64:
        wrong["dtype"] = dtype
    return wrong


def rope_table(positions: torch.Tensor, rope_dim: int, theta: float) -> torch.Tensor:
    """As the operator, fp32, for rope dimensions that are powers of two."""
    rows, half = len(positions), rope_dim // 2
    table = torch.empty(rows, half, 2, dtype=torch.float32, device=positions.device)
    if rows:
        period = _periods(rope_dim, theta, positions.device)
        angles[(triton.cdiv(rows, 8),)](
            positions, period, table, rows, HALF=half, BLOCK=8, num_warps=2
        )
    return table
