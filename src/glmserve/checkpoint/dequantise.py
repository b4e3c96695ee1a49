# SPDX-License-Identifier: Apache-2.0
"""From stored parts to numbers: the weight that a rank's slice of them stands for.

Products are made in fp32 or wider and rounded once, to the model's dtype, by whoever copies them.
Formulas: compressed-tensors w = (q - z) * s with q and z stored with 2^(bits-1) added; AutoAWQ the
same on unsigned numbers; block-fp8 w = value * scale of its 128 x 128 block.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from glmserve.checkpoint.formats import BLOCK, Part, Scheme, StoredWeight
from glmserve.kernels.experts import Int4Weight
from glmserve.kernels.experts.reference import pack_nibbles

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output that nibble k of a word belongs to


def dequantise(weight: StoredWeight, part: Part, raw: Mapping[str, Tensor], out: Tensor) -> None:
    """Fills `out` with the slice `part` of the weight; `raw` holds its `StoredWeight.slices`."""
    acc = torch.promote_types(out.dtype, torch.float32)
    rows, columns = part
    scales = raw["scales"].to(acc)
    if weight.scheme is Scheme.BLOCK_FP8:
        _block_fp8(raw["values"], scales, rows, columns, out)
        return
    group = _within(columns, weight.group)
    if weight.scheme is Scheme.AWQ:
        q = _awq_nibbles(raw["values"], rows)
        z = _awq_nibbles(raw["zeros"], rows)[group]
        out.copy_(((q - z).to(acc) * scales[group]).t())
        return
    if weight.scheme is Scheme.INT8:
        out.copy_(raw["values"].to(acc) * scales[:, group])
        return
    q = _unpack(raw["values"], weight.bits)[:, _inside(columns, 32 // weight.bits)]
    if "zeros" in raw:  # both have half of the range added
        z = _unpack(raw["zeros"].t(), weight.bits).t()[_inside(rows, 32 // weight.bits)]
        q = q - z[:, group]
    else:
        q = q - (1 << (weight.bits - 1))
    out.copy_(q.to(acc) * scales[:, group])


def _block_fp8(values: Tensor, scales: Tensor, rows: slice, columns: slice, out: Tensor) -> None:
    """One row of blocks at a time, which stays in a CPU's cache."""
    spread = scales[:, _within(columns, BLOCK)]
    begin = 0
    for line in spread:
        end = min((rows.start + begin) // BLOCK * BLOCK + BLOCK, rows.stop) - rows.start
        out[begin:end] = values[begin:end].to(scales.dtype) * line
        begin = end


def repack_awq(raw: Mapping[str, Tensor], rows: slice) -> Int4Weight:
    """AutoAWQ's parts as the int4 kernel reads them; rows a multiple of 8. Same numbers."""
    return Int4Weight(
        pack_nibbles(_awq_nibbles(raw["values"], rows).t()),
        raw["scales"].t(),
        pack_nibbles(_awq_nibbles(raw["zeros"], rows)).t(),
    )


def _within(part: slice, unit: int) -> Tensor:
    """For each index of the slice the unit that it lies in, counted from the slice's first one."""
    first = part.start // unit
    return torch.arange(part.start - first * unit, part.stop - first * unit).floor_divide(unit)


def _inside(part: slice, unit: int) -> slice:
    """The slice, counted from the start of the unit that it begins in."""
    base = part.start // unit * unit
    return slice(part.start - base, part.stop - base)


def _unpack(words: Tensor, bits: int) -> Tensor:
    """[r, c] int32 -> [r, c * 32 / bits], unsigned, from the low bits up."""
    shifts = torch.arange(0, 32, bits, device=words.device)
    numbers: Tensor = ((words[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)
    return numbers


def _awq_nibbles(words: Tensor, rows: slice) -> Tensor:
    """[n, words] -> [n, outputs of the slice]."""
    nibbles = _unpack(words, 4).unflatten(-1, (-1, 8))
    ordered = torch.empty_like(nibbles)
    ordered[..., list(AWQ_ORDER)] = nibbles
    outputs: Tensor = ordered.flatten(-2)[:, _inside(rows, 8)]
    return outputs
