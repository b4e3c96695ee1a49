# SPDX-License-Identifier: Apache-2.0
"""The embedding shard: a row where this rank holds the token, zeros elsewhere."""

import triton
import triton.language as tl

from ..triton_common import let_next_start, wait_for_previous


@triton.jit
def embed_rows(tokens, table, out, first, held, width, BLOCK: tl.constexpr):
    """Program (r, b): columns [b * BLOCK, (b + 1) * BLOCK) of row r; a copy, whatever the dtype."""
    let_next_start()
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_previous()
    local = tl.load(tokens + row) - first
    here = (local >= 0) & (local < held)
    value = tl.load(table + local * width + n, mask=(n < width) & here, other=0)
    tl.store(out + row * width + n, value, mask=n < width)
