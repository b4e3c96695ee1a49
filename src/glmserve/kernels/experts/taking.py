# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""Rows in the order of the pairs, so that TMA can bring an expert's."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..linear.hopper import PROGRAMS
from ..pdl import pdl
from ..quantise.launch import empty_rows
from ..quantise.reference import QuantRows
from ..triton_common import let_next_start, wait_for_previous
from .pairs import SortedPairs

_TAKERS = 8 * PROGRAMS  # programs of `take_pairs`, all on the card at once


@triton.jit(do_not_specialize=["rows", "pairs"])
def take_pairs(
    x, x_scales, order, count, out, out_scales, rows, pairs, width,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[p] = x[order[p] // TOP_K] for the pairs below `count`, as 4-byte words, and the scales
    [width / 32, pairs] likewise. width: words of a row.

    Program p takes pairs p, p + programs, ... and knows the next one's row before it copies.
    """
    let_next_start()
    wait_for_previous()
    first, programs = tl.program_id(0), tl.num_programs(0)
    words = tl.arange(0, BLOCK)
    groups = tl.arange(0, BLOCK // 32)
    wide = width.to(tl.int64)
    stop = tl.load(count)
    here = tl.load(order + first)  # of a pair behind the last it is anything, and unused
    for pair in tl.range(first, stop, programs):
        row = here // TOP_K
        here = tl.load(order + tl.minimum(pair + programs, stop - 1))
        for begin in tl.range(0, width, BLOCK):
            word, group = begin + words, begin // 32 + groups
            line = group.to(tl.int64)
            value = tl.load(x + row * wide + word, mask=word < width)
            scale = tl.load(x_scales + line * rows + row, mask=group < width // 32)
            tl.store(out + pair * wide + word, value, mask=word < width)
            tl.store(out_scales + line * pairs + pair, scale, mask=group < width // 32)


def take(x: QuantRows, pairs: SortedPairs, top_k: int) -> QuantRows:
    """The rows of the pairs in their order; those of other ranks' pairs hold anything."""
    (rows, depth), total = x.values.shape, pairs.order.numel()
    out = empty_rows(total, depth, x.values.device)
    take_pairs[(min(total, _TAKERS),)](
        x.values.view(torch.int32), x.scales, pairs.order, pairs.offsets[-1:],
        out.values.view(torch.int32), out.scales, rows, total, depth // 4, top_k, 2048,
        num_warps=4, **pdl(),
    )  # fmt: skip
    return out
