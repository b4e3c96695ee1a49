# SPDX-License-Identifier: Apache-2.0
"""Two RMSNorms side by side: program (r, 0) norms the embedding, (r, 1) the hidden state."""

import triton
import triton.language as tl

from ..residual_norm.kernel import norm_tile
from ..triton_common import to_bf16

GROUP = tl.constexpr(128)


@triton.jit
def mtp_rows(embedding, hidden, embedding_norm, hidden_norm, out, width, eps, GROUPS: tl.constexpr):
    """embedding, hidden [R, width] -> out [R, 2 width]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = column < width
    half = tl.program_id(1)
    if half == 0:
        tile = tl.load(embedding + row * width + column, mask=inside, other=0.0)
        gain = tl.load(embedding_norm + column, mask=inside, other=0.0)
    else:
        tile = tl.load(hidden + row * width + column, mask=inside, other=0.0)
        gain = tl.load(hidden_norm + column, mask=inside, other=0.0)
    result = to_bf16(norm_tile(tile.to(tl.float32), gain.to(tl.float32), width, eps))
    tl.store(out + (2 * row + half) * width + column, result, mask=inside)
