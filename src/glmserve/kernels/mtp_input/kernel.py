# SPDX-License-Identifier: Apache-2.0
"""Two RMSNorms side by side: program (r, 0) norms the embedding, (r, 1) the hidden state. Of the
pair's columns only those of the rank are written."""

import triton
import triton.language as tl

from ..residual_norm.kernel import norm_tile
from ..triton_common import let_next_start, to_bf16, wait_for_previous

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
    let_next_start()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = column < width
    half = tl.program_id(1)
    if half == 0:
        source = embedding
        weight = embedding_norm
    else:
        source = hidden
        weight = hidden_norm
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous()
    start = half * width - first  # of this half among the rank's columns
    if (start < share) & (start + width > 0):
        tile = tl.load(source + row * width + column, mask=inside, other=0.0).to(tl.float32)
        result = to_bf16(norm_tile(tile, gain, width, eps))
        kept = inside & (column >= -start) & (column < share - start)
        tl.store(out + row * share + start + column, result, mask=kept)
