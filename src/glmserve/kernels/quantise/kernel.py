# SPDX-License-Identifier: Apache-2.0
"""1x128 quantisation of rows, and the tile function that other operators end with."""

import triton
import triton.language as tl

from ..triton_common import divide, let_next_start, to_e4m3, wait_for_previous

GROUP = tl.constexpr(128)


@triton.jit
def quantise_groups(tile):
    """[G, 128] fp32 -> (e4m3 [G, 128], scales [G] fp32).

    Who stores a bf16 tile as well says `tl.max_contiguous(pointers, (1, 8))` of the e4m3 tile's:
    eight values a thread in both, or the tiles are exchanged through shared memory.
    """
    scales = tl.maximum(tl.max(tl.abs(tile), 1) * (1.0 / 448.0), 1e-30)
    return to_e4m3(tile * divide(1.0, scales)[:, None]), scales


@triton.jit
def quantise_rows(x, values, scales, rows, groups, BLOCK: tl.constexpr):
    """Program (r, b): groups [b * BLOCK, (b + 1) * BLOCK) of row r."""
    let_next_start()
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = row * groups * GROUP + group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = group < groups
    wait_for_previous()
    tile = tl.load(x + at, mask=inside[:, None], other=0.0).to(tl.float32)
    quantised, scale = quantise_groups(tile)
    tl.store(values + at, quantised, mask=inside[:, None])
    tl.store(scales + group * rows + row, scale, mask=inside)
