# SPDX-License-Identifier: Apache-2.0
"""Host side of SwiGLU."""

from __future__ import annotations

import torch

from ..quantise.launch import empty_rows
from ..quantise.reference import GROUP, QuantRows
from . import kernel

_BLOCK = 4  # groups of 128 columns a program
_COUNTED_PROGRAMS = 1024


def unserved(dtype: torch.dtype) -> dict[str, object]:
    """Why no kernel takes gate and up in `dtype`."""
    return {} if dtype == torch.bfloat16 else {"dtype": dtype}


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    return swiglu_parts(gate_up[None])


def swiglu_quantised(gate_up: torch.Tensor) -> QuantRows:
    return swiglu_parts_quantised(gate_up[None])


def swiglu_parts(parts: torch.Tensor, count: torch.Tensor | None = None) -> torch.Tensor:
    """[parts, R, 2 I] partial sums -> [R, I] bf16; count [1]: how many rows exist."""
    out = torch.empty(
        parts.shape[1], parts.shape[2] // 2, dtype=torch.bfloat16, device=parts.device
    )
    _launch(parts, out, out, count)
    return out


def swiglu_parts_quantised(parts: torch.Tensor, count: torch.Tensor | None = None) -> QuantRows:
    """The same, quantised."""
    out = empty_rows(parts.shape[1], parts.shape[2] // 2, parts.device)
    _launch(parts, out.values, out.scales, count)
    return out


def _launch(
    parts: torch.Tensor, out: torch.Tensor, scales: torch.Tensor, count: torch.Tensor | None
) -> None:
    splits, rows, wide = parts.shape
    inner = wide // 2
    # Rows that only a device counter knows are not worth a program each.
    programs = rows if count is None else min(rows, _COUNTED_PROGRAMS)
    grid = (programs, -(-inner // (_BLOCK * GROUP)))
    kernel.swiglu_rows[grid](
        parts, out, scales, out if count is None else count, rows, inner, parts.stride(0),
        splits, scales is not out, count is not None, _BLOCK, num_warps=4,
    )  # fmt: skip
