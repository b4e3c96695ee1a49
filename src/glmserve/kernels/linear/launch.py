# SPDX-License-Identifier: Apache-2.0
"""Host side of the products: which kernel and tiles a weight's shape and a number of rows get.

The number of K chunks is chosen by the weight's shape alone (`configs.json`, else a rule): it fixes
the order of a sum. Everything else (tile sizes, one program a chunk or one for all) may follow the
number of rows, because it does not change a bit.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from ..quantise.reference import QuantRows
from . import hopper, hopper_few, hopper_head, hopper_mid, kernel, narrow
from .reference import QuantWeight

FEW = 64  # rows up to which the swap-AB kernel is used
_WAVE = 264  # programs that fill the card twice
_PARTIAL_FLOATS = 4 << 20
_TICKETS = 1 << 14
_MOST_CHUNKS = hopper_few.MOST_CHUNKS.value


class Plan(NamedTuple):
    """What a weight's shape decides."""

    chunks: int
    block_k: int


@functools.cache
def _configs() -> dict[str, Any]:
    text = (Path(__file__).parent / "configs.json").read_text(encoding="utf-8")
    configs: dict[str, Any] = json.loads(text)
    return configs


@functools.cache
def plan(width: int, depth: int, scaled: bool) -> Plan:
    """The plan of a [width, depth] weight, depth a multiple of 64 (128 when scaled)."""
    block = 128 if depth % 128 == 0 else 64
    assert depth % block == 0 and not (scaled and block == 64), depth
    kind = "fp8" if scaled else "bf16"
    tuned = _configs()["chunks"].get(f"{kind}:{width}x{depth}")
    if tuned is not None:
        return Plan(tuned, block)
    return Plan(_chunks(-(-width // 64), depth // block), block)


def _chunks(tiles: int, blocks: int) -> int:
    """The largest divisor of `blocks` that keeps the programs within two waves and a chunk at
    three blocks or more; narrow sums over wide weights stay whole."""
    if tiles >= 64 and blocks <= 16:
        return 1
    fitting = [c for c in range(1, blocks + 1) if blocks % c == 0 and blocks // c >= 3]
    return max((c for c in fitting if c * tiles <= _WAVE and c <= _MOST_CHUNKS), default=1)


def splits(tiles: int, size: int, chunks: int) -> bool:
    """Whether the chunks of `tiles` tiles of `size` elements get programs of their own: where the
    tiles alone would leave the card idle and the partial sums have a place."""
    fits = tiles <= _TICKETS and tiles * chunks * size <= _PARTIAL_FLOATS
    return chunks > 1 and tiles <= _WAVE and fits


@functools.cache
def workspace(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(partial sums, tickets) of a device: allocated once, used by one stream at a time."""
    partial = torch.empty(_PARTIAL_FLOATS, dtype=torch.float32, device=device)
    return partial, torch.zeros(_TICKETS, dtype=torch.int32, device=device)


def unserved(depth: int, dtype: torch.dtype, scaled: bool = False) -> dict[str, object]:
    """Why no kernel takes rows of `depth` columns in `dtype` against such a weight."""
    reasons: dict[str, object] = {}
    if depth % (128 if scaled else 8):
        reasons["input width"] = depth
    if dtype != torch.bfloat16:
        reasons["dtype"] = dtype
    return reasons


def linear(
    x: torch.Tensor | QuantRows, weight: torch.Tensor | QuantWeight, out_dtype: torch.dtype
) -> torch.Tensor:
    """x [R, K] times weight [N, K] transposed, [R, N] in `out_dtype` (bf16 or fp32)."""
    values, scales = x if isinstance(x, QuantRows) else (x, x)
    w_values, w_scales = weight if isinstance(weight, QuantWeight) else (weight, weight)
    scaled = isinstance(weight, QuantWeight)
    rows, depth = values.shape
    width = w_values.shape[0]
    assert values.is_contiguous(), values.stride()
    assert w_values.is_contiguous(), w_values.stride()
    out = torch.empty(rows, width, dtype=out_dtype, device=values.device)
    if depth % 64:
        return narrow.linear(values, w_values, out)
    shape = plan(width, depth, scaled)
    gluon = scaled and out_dtype == torch.bfloat16 and values.device.type != "cpu"
    device = values.device
    # The plain forms below serve other types, and the fp8 rows in between.
    if gluon and hopper_mid.form(rows, width, depth, shape.chunks, _PARTIAL_FLOATS, device)[0]:
        hopper_mid.linear(values, scales, w_values, w_scales, workspace(device), out, shape.chunks)
    elif gluon and rows <= hopper_few.MOST_ROWS:
        hopper_few.linear(values, scales, w_values, w_scales, workspace(device), out, shape.chunks)
    elif gluon and hopper.fills(rows, width, shape.chunks):
        hopper.linear(values, scales, w_values, w_scales, out, shape.chunks)
    elif rows <= FEW:
        _few(values, scales, w_values, w_scales, out, shape, scaled)
    else:
        _many(values, scales, w_values, w_scales, out, shape, scaled)
    return out


def _few(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    weight: torch.Tensor,
    w_scales: torch.Tensor,
    out: torch.Tensor,
    shape: Plan,
    scaled: bool,
) -> None:
    rows, width = out.shape
    block_n, block_m = 64, 16 if rows <= 16 else 32 if rows <= 32 else 64
    tiles = -(-width // block_n)
    split = splits(tiles, block_n * block_m, shape.chunks)
    stages = 6 if shape.chunks == 1 else 4
    grid = (tiles * (shape.chunks if split else 1), -(-rows // block_m))
    kernel.few_rows[grid](
        x, x_scales, weight, w_scales, *workspace(x.device), out, rows, width, x.shape[1],
        shape.chunks, block_n, block_m, shape.block_k, split, scaled, stages,
        num_warps=4,
    )  # fmt: skip


def _many(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    weight: torch.Tensor,
    w_scales: torch.Tensor,
    out: torch.Tensor,
    shape: Plan,
    scaled: bool,
) -> None:
    rows, width = out.shape
    whole = shape.chunks == 1 and not scaled and x.device.type != "cpu"
    if whole and hopper_head.fills(rows, width):
        return hopper_head.linear(x, weight, out)
    # fp8: two small programs a multiprocessor, so that one's scaling hides behind the other's
    # products. bf16 needs no scaling, and larger tiles read less.
    block_m, block_n, warps = (64, 128, 4) if scaled else (128, 128, 8)
    tiles = -(-rows // block_m) * -(-width // block_n)
    split = splits(tiles, block_m * block_n, shape.chunks)
    x_desc = TensorDescriptor.from_tensor(x, [block_m, shape.block_k])
    w_desc = TensorDescriptor.from_tensor(weight, [block_n, shape.block_k])
    kernel.many_rows[(tiles * (shape.chunks if split else 1),)](
        x_desc, x_scales, w_desc, w_scales, *workspace(x.device), out, rows, width, x.shape[1],
        shape.chunks, block_m, block_n, shape.block_k, shape.chunks > 1, split, scaled, 16, 3,
        # Three programs a multiprocessor instead of two: 24 -> 20 us at 192 rows of 3072 x 6144.
        num_warps=warps, maxnreg=168 if split and scaled else None,
    )  # fmt: skip
