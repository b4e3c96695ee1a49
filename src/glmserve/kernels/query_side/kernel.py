# SPDX-License-Identifier: Apache-2.0
"""The query side in the Triton language: absorption with RoPE, and the index queries.

fp8 index queries get one power-of-two scale a head and row, and the scale goes into that head's
weight: ReLU(s q . k) = s ReLU(q . k) for s > 0, so scoring never sees it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..head_product.kernel import multiply_heads, unserved
from ..linear.parts import MOST_CHUNKS, add_parts
from ..pdl import pdl
from ..triton_common import (
    divide,
    let_next_start,
    power_of_two_above,
    to_bf16,
    to_e4m3,
    wait_for_previous,
)

_LEAST = tl.constexpr(1e-4)  # quant.SMALLEST_AMAX


@triton.jit(do_not_specialize=["weights_step", "parts"])
def turn_index_query(
    query, weights, weights_row, weights_step, parts, rope, out, out_weights, constant,
    ALL_HEADS: tl.constexpr, HEADS: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    let_next_start()
    row = tl.program_id(0)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    i = tl.arange(0, 64)
    at = (row * ALL_HEADS + h)[:, None] * 128 + tl.arange(0, 128)[None, :]
    wait_for_previous()
    q = tl.load(query + at).to(tl.float32)
    even, odd = tl.split(tl.reshape(q, [HEADS, 64, 2]))
    angle = rope + (row * 32 + i) * 2
    cos = tl.load(angle, mask=i < 32, other=1.0)[None, :]
    sin = tl.load(angle + 1, mask=i < 32, other=0.0)[None, :]
    turned = even * cos - odd * sin
    odd = odd * cos + even * sin
    line = weights + row.to(tl.int64) * weights_row + h
    w = add_parts(line, weights_step, parts, h < ALL_HEADS) * constant
    if FP8:
        top = tl.maximum(tl.max(tl.maximum(tl.abs(turned), tl.abs(odd)), 1), _LEAST)
        step = power_of_two_above(divide(top, 448.0 + top * 0.0))
        w = w * step
        q = tl.reshape(tl.join(turned, odd), [HEADS, 128])
        tl.store(out + at, to_e4m3(q / step[:, None]))  # exact: a power of two
    else:
        tl.store(out + at, to_bf16(tl.reshape(tl.join(turned, odd), [HEADS, 128])))
    tl.store(out_weights + row * ALL_HEADS + h, w)


def absorb_unserved(
    query: torch.Tensor, w_uk: torch.Tensor, rope: torch.Tensor
) -> dict[str, object]:
    """Dimensions that the absorption kernel does not serve."""
    wrong = unserved(*w_uk.shape[1:])
    if rope.shape[1] != 32:
        wrong["rope dim"] = 2 * rope.shape[1]
    if query.dtype != torch.bfloat16:
        wrong["dtype"] = query.dtype
    return wrong


def absorb_query(query: torch.Tensor, w_uk: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    rows, heads, _ = query.shape
    width = w_uk.shape[2] + 2 * rope.shape[1]
    out = torch.empty(rows, heads, width, dtype=query.dtype, device=query.device)
    multiply_heads(query, w_uk, out, rope)
    return out


def index_unserved(query: torch.Tensor, rope: torch.Tensor) -> dict[str, object]:
    """Dimensions that the index query kernel does not serve."""
    wrong: dict[str, object] = {}
    if query.shape[1] % 8:
        wrong["index heads"] = query.shape[1]
    if query.shape[2] != 128 or rope.shape[1] != 32:
        wrong["index dim"] = (query.shape[2], 2 * rope.shape[1])
    if query.dtype != torch.bfloat16:
        wrong["dtype"] = query.dtype
    return wrong


def index_query(
    query: torch.Tensor, head_weights: torch.Tensor, rope: torch.Tensor, fp8: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    assert query.is_contiguous(), query.stride()
    assert head_weights.stride(2) == 1, head_weights.stride()
    assert len(head_weights) <= MOST_CHUNKS.value, head_weights.shape
    rows, heads, dim = query.shape
    dtype = torch.float8_e4m3fn if fp8 else query.dtype
    out = torch.empty(query.shape, dtype=dtype, device=query.device)
    weights = torch.empty(rows, heads, dtype=torch.float32, device=query.device)
    if rows:
        turn_index_query[(rows, heads // 8)](
            query, head_weights, head_weights.stride(1), head_weights.stride(0), len(head_weights),
            rope, out, weights, (dim * heads) ** -0.5, ALL_HEADS=heads, HEADS=8, FP8=fp8,
            num_warps=2, **pdl(),
        )  # fmt: skip
    return out, weights
