# SPDX-License-Identifier: Apache-2.0
"""Host side of the router."""

from __future__ import annotations

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from ..experts.launch import sort_pairs
from ..experts.pairs import SortedPairs, empty_pairs
from ..linear import kernel as linear_kernel
from ..pdl import pdl
from . import kernel
from .count import ChoiceCount

_SPLIT_ROWS = 256  # above, one program sums all chunks of its tile


def chunks_of(depth: int, block: int) -> int:
    """K chunks: two or more blocks each, at most 12 (GLM's 48 blocks of 128)."""
    blocks = depth // block
    return max(c for c in range(1, 13) if blocks % c == 0 and (blocks // c >= 2 or c == 1))


def unserved(x: torch.Tensor, bias: torch.Tensor) -> dict[str, object]:
    """Why no kernel routes these rows."""
    reasons: dict[str, object] = {}
    if x.dtype != torch.bfloat16 or bias.dtype != torch.float32:
        reasons["dtype"] = (x.dtype, bias.dtype)
    if x.shape[1] % 64:
        reasons["input width"] = x.shape[1]
    return reasons


def route(
    x: torch.Tensor,
    gate: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    scale: float,
    count: ChoiceCount | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _choose(x, gate, bias, top_k, scale, count, None, 0, 0)


def route_sorted(
    x: torch.Tensor,
    gate: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    scale: float,
    count: ChoiceCount | None,
    first: int,
    local: int,
    block_m: int,
) -> tuple[torch.Tensor, torch.Tensor, SortedPairs]:
    """`route`, and the pairs of experts [first, first + local) in tiles of block_m rows."""
    if len(x) > 1:
        ids, weights = route(x, gate, bias, top_k, scale, count)
        return ids, weights, sort_pairs(ids, first, local, block_m)
    pairs = empty_pairs(top_k, local, block_m, x.device)
    ids, weights = _choose(x, gate, bias, top_k, scale, count, pairs, first, local)
    return ids, weights, pairs


def _choose(
    x: torch.Tensor,
    gate: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    scale: float,
    count: ChoiceCount | None,
    pairs: SortedPairs | None,
    first: int,
    local: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    parts = _scores(x, gate)
    rows, experts = len(x), len(gate)
    ids = torch.empty(rows, top_k, dtype=torch.int64, device=x.device)
    weights = torch.empty(rows, top_k, dtype=torch.float32, device=x.device)
    sorted_, max_tiles = ([ids] * 7, 0) if pairs is None else (list(pairs[:7]), pairs.max_tiles)
    kernel.choose_experts[(rows,)](
        parts, bias, ids, weights, count.totals if count else ids, count.row_seq if count else ids,
        count.padding if count else 0, rows, experts, scale, *sorted_, first, local, max_tiles,
        top_k, parts.shape[0], triton.next_power_of_2(experts), count is not None,
        pairs is not None, num_warps=1, **pdl(),
    )  # fmt: skip
    return ids, weights


def _scores(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """[parts, R, E] fp32, to be added in order."""
    rows, depth = x.shape
    experts = gate.shape[0]
    wide = gate.dtype == torch.float32
    block_k = 64 if wide or depth % 128 else 128
    chunks = chunks_of(depth, block_k)
    if wide or rows <= _SPLIT_ROWS:
        parts = torch.empty(chunks, rows, experts, dtype=torch.float32, device=x.device)
        block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
        kernel.score_parts[(-(-experts // 64) * chunks, -(-rows // block_m))](
            x, gate, parts, rows, experts, depth, 64, block_m, block_k, chunks, wide, num_warps=4,
            **pdl(),
        )  # fmt: skip
        return parts
    parts = torch.empty(1, rows, experts, dtype=torch.float32, device=x.device)
    x_desc = TensorDescriptor.from_tensor(x, [128, block_k])
    g_desc = TensorDescriptor.from_tensor(gate, [128, block_k])
    linear_kernel.many_rows[(-(-rows // 128) * -(-experts // 128),)](
        x_desc, x, g_desc, gate, parts, parts, parts, rows, experts, depth, chunks,
        128, 128, block_k, chunks > 1, False, False, 16, 3, num_warps=8,
    )  # fmt: skip
    return parts
