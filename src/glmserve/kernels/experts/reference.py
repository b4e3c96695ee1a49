# SPDX-License-Identifier: Apache-2.0
"""(row, expert) pairs sorted by expert; each hit expert is two products over its own rows.

A quantised expert is dequantised: block-fp8 with rows quantised 1x128, int4 with rows as they are.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch.nn.functional import linear

from ..linear.reference import QuantWeight, quant_linear
from ..precision import acc_dtype
from ..swiglu.reference import swiglu


class Int4Weight(NamedTuple):
    """Experts in int4 as compressed-tensors packs them: w = (q - z) * scale by groups of columns.

    Column 8 c + j of a row is nibble j (4 bits from bit 4 j) of word c, stored with 8 added. Zero
    points are packed the same way along the rows: row 8 r + j is nibble j of word r.
    """

    packed: torch.Tensor  # [E, N, K / 8] int32
    scales: torch.Tensor  # [E, N, K / group] bf16, or fp16 as AutoAWQ has them
    zeros: torch.Tensor | None  # [E, N / 8, K / group] int32; None: symmetric, z = 0


ExpertWeight = torch.Tensor | QuantWeight | Int4Weight


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: ExpertWeight,
    down: ExpertWeight,
    first: int,
    shared: torch.Tensor,
) -> torch.Tensor:
    count = first_tensor(gate_up).shape[0]
    local = ids.flatten() - first
    sorted_ids, pairs = local.sort(stable=True)
    bounds = torch.searchsorted(sorted_ids, torch.arange(count + 1, device=x.device)).tolist()
    acc = acc_dtype(x.dtype)
    total = shared.to(acc)
    pairs = pairs[bounds[0] : bounds[-1]]  # what lies outside is other ranks' work
    if pairs.numel() == 0:
        return shared
    rows = pairs // ids.shape[1]
    gathered = x[rows]
    outputs = [
        product(swiglu(product(gathered[a - bounds[0] : b - bounds[0]], gate_up, e)), down, e)
        for e, (a, b) in enumerate(itertools.pairwise(bounds))
        if b > a
    ]
    scaled = torch.cat(outputs).to(acc) * weights.flatten()[pairs, None].to(acc)
    return total.index_add(0, rows, scaled).to(x.dtype)


def product(x: torch.Tensor, weight: ExpertWeight, expert: int) -> torch.Tensor:
    """x [n, K] times one expert's weight, [n, N] in x's dtype."""
    if isinstance(weight, QuantWeight):
        one = QuantWeight(weight.values[expert], weight.scales[expert])
        return quant_linear(x, one).to(x.dtype)
    if isinstance(weight, Int4Weight):
        return linear(x, dequantise_int4(weight, expert).to(x.dtype))
    return linear(x, weight[expert])


def first_tensor(weight: ExpertWeight) -> torch.Tensor:
    """The tensor [E, N, ...] that holds the numbers themselves."""
    return weight if isinstance(weight, torch.Tensor) else weight[0]


def dequantise_int4(weight: Int4Weight, expert: int) -> torch.Tensor:
    """[N, K] bf16 of one expert."""
    scales = weight.scales[expert]
    rows = scales.shape[0]
    q = unpack_nibbles(weight.packed[expert])
    group = q.shape[1] // scales.shape[1]
    if weight.zeros is None:
        z = torch.full((rows, 1), 8, device=q.device)
    else:
        z = unpack_nibbles(weight.zeros[expert].t()).t()[:rows].repeat_interleave(group, 1)
    # Exact in fp32: a nibble times a 16-bit float. One rounding, as in the kernel.
    return ((q - z) * scales.float().repeat_interleave(group, 1)).to(torch.bfloat16)


def unpack_nibbles(words: torch.Tensor) -> torch.Tensor:
    """[r, c] int32 -> [r, 8 c], nibbles 0..15 from the low bits up."""
    shifts = torch.arange(0, 32, 4, device=words.device)
    return ((words[..., None] >> shifts) & 15).flatten(-2)


def pack_nibbles(nibbles: torch.Tensor) -> torch.Tensor:
    """The inverse: [r, 8 c] of 0..15 -> [r, c] int32."""
    shifts = torch.arange(0, 32, 4, device=nibbles.device)
    words = (nibbles.long().unflatten(-1, (-1, 8)) << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
