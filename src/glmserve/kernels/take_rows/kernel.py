# SPDX-License-Identifier: Apache-2.0
"""A gather of rows in the Triton language, as words of four bytes whatever they mean."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from ..pdl import pdl
from ..triton_common import let_next_start, wait_for_previous

_WORD = 4  # bytes


@triton.jit(do_not_specialize=["words"])
def copy_rows(x, index, out, words, BLOCK: tl.constexpr):
    let_next_start()
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_previous()
    source = tl.load(index + row).to(tl.int64)
    tl.store(out + row * words + i, tl.load(x + source * words + i, mask=i < words), mask=i < words)


def unserved(x: torch.Tensor) -> dict[str, object]:
    """Why the kernel does not take these rows."""
    wrong: dict[str, object] = {}
    if math.prod(x.shape[1:]) * x.element_size() % _WORD:
        wrong["row bytes"] = math.prod(x.shape[1:]) * x.element_size()
    return wrong


def take_rows(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    assert x.is_contiguous(), x.stride()
    assert index.is_contiguous(), index.stride()
    out = torch.empty((len(index), *x.shape[1:]), dtype=x.dtype, device=x.device)
    words = math.prod(x.shape[1:]) * x.element_size() // _WORD
    if out.numel():
        block = 32 if words <= 32 else 1024
        copy_rows[(len(index), triton.cdiv(words, block))](
            x.view(-1).view(torch.int32), index, out.view(-1).view(torch.int32), words,
            BLOCK=block, num_warps=1 if block == 32 else 4, **pdl(),
        )  # fmt: skip
    return out
