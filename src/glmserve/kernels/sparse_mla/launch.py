# SPDX-License-Identifier: Apache-2.0
"""Launches sparse MLA: which form, how many leaves, where partials lie, and the merge."""

from __future__ import annotations

import math

import torch
import triton

from ..pdl import pdl
from ..quant import latent_row_bytes
from . import small
from .joining import MANY_ROWS, TILE
from .kernel import attend_bf16, attend_fp8, merge

LEAF, LONG_LEAF = 256, 2048  # tokens of one online softmax while rows are few, and of many rows
STAGES, WARPS = 2, 4


def unserved(
    query: torch.Tensor, latent_cache: torch.Tensor, kv_lora_rank: int
) -> dict[str, object]:
    """Dimensions that the kernels do not serve."""
    heads, width = query.shape[1:]
    wrong: dict[str, object] = {}
    if heads not in (1, 2, 4, 8, 16, 32, 64):
        wrong["heads"] = heads
    if kv_lora_rank not in (128, 256, 512) or width != kv_lora_rank + 64:
        wrong["latent row"] = (kv_lora_rank, width)
    if query.dtype != torch.bfloat16:
        wrong["query dtype"] = query.dtype
    rows = {torch.uint8: latent_row_bytes(kv_lora_rank), torch.bfloat16: width}
    if rows.get(latent_cache.dtype) != latent_cache.shape[1]:
        wrong["cache row"] = (latent_cache.dtype, latent_cache.shape[1])
    return wrong


def sparse_mla(
    query: torch.Tensor,
    latent_cache: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """As the operator. Many rows (prefill) take each row's selection as one leaf, unmerged.

    Eight heads over fp8 rows have a form of their own (`hopper`) on a GPU, for up to 2048 slots a
    row, the unused ones at the end; the interpreter takes the form of all other sizes.
    """
    assert query.is_contiguous(), query.stride()
    assert latent_cache.is_contiguous(), latent_cache.stride()
    assert slots.is_contiguous(), slots.stride()
    rows, all_heads, width = query.shape
    if width != 576 or all_heads < 8:
        return small.attend(query, latent_cache, slots, scale * math.log2(math.e))
    k = slots.shape[1]
    out = torch.empty(rows, all_heads, 512, dtype=query.dtype, device=query.device)
    if rows == 0:
        return out
    fp8 = latent_cache.dtype == torch.uint8
    scale *= math.log2(math.e)
    if fp8 and all_heads == 8 and query.device.type != "cpu":
        from .hopper import launch as hopper

        if k <= hopper.LONGEST:
            hopper.launch(query, latent_cache, slots, out, scale)
            return out
    leaf = max(LONG_LEAF, triton.next_power_of_2(k)) if rows > MANY_ROWS else LEAF
    leaves = triton.cdiv(k, leaf)
    alone = leaves == 1
    target, lse = out, out
    if not alone:
        shape = (rows, leaves, all_heads)
        target = torch.empty(*shape, 512, dtype=torch.bfloat16, device=query.device)
        lse = torch.empty(shape, dtype=torch.float32, device=query.device)
    heads = min(all_heads, 16)
    kernel = attend_fp8 if fp8 else attend_bf16
    kernel[(rows * leaves, all_heads // heads)](
        query, latent_cache, slots, target, lse, scale, k, leaves, all_heads, HEADS=heads,
        LEAF=leaf, TILE=TILE, STAGES=STAGES, WIDE=latent_cache.numel() >= 1 << 31,
        PARTIAL=not alone, num_warps=WARPS, **pdl(),
    )  # fmt: skip
    if alone:
        return out
    most = max(8, triton.next_power_of_2(leaves))  # few values, so few compiled forms
    dims = 128
    merge[(rows, all_heads // heads, 512 // dims)](
        target, lse, out, leaves, all_heads, HEADS=heads,
        LEAVES=most, DIMS=dims, PERMUTED=fp8, num_warps=4, **pdl(),
    )  # fmt: skip
    return out
