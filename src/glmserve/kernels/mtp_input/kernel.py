# SPDX-License-Identifier: Apache-2.0
"""Two RMSNorms side by side: program (r, 0) norms the embedding, (r, 1) the hidden state. Of the
pair's columns only those of the rank are written."""

import triton
import triton.language as tl

from ..residual_norm.kernel import norm_tile
from ..triton_common import to_bf16

GROUP = tl.constexpr(128)


@triton.jit(do_not_specialize=["first"])
def mtp_rows(
    embedding,
    hidden,
    embedding_norm,
    hidden_norm,
    out,
    width,
    first,
    share,
    eps,
    GROUPS: tl.constexpr,
):
    """embedding, hidden [R, width] -> columns [first, first + share) of [R, 2 width] in out."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = column < width
    half = tl.program_id(1)
    place = half * width + column - first
    kept = inside & (place >= 0) & (place < share)
    if (half * width < first + share) & (half * width + width > first):
        if half == 0:
            tile = tl.load(embedding + row * width + column, mask=inside, other=0.0)
            gain = tl.load(embedding_norm + column, mask=inside, other=0.0)
        else:
            tile = tl.load(hidden + row * width + column, mask=inside, other=0.0)
            gain = tl.load(hidden_norm + column, mask=inside, other=0.0)
        result = to_bf16(norm_tile(tile.to(tl.float32), gain.to(tl.float32), width, eps))
        tl.store(out + row * share + place, result, mask=kept)
