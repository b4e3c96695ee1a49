# SPDX-License-Identifier: Apache-2.0
"""The largest index scores of each row, as positions; ties go to the lower position."""

from __future__ import annotations

import torch

from ..dispatch import use_kernel
from . import reference


def topk_select(
    logits: torch.Tensor, k: int, last: torch.Tensor | None = None, first: int = 0
) -> torch.Tensor:
    """[R, context] scores, -inf where hidden -> [R, min(k, context)] int32 positions, ascending.

    With `last` [R] only places first <= p <= last[r] count, whatever the others hold.
    A row that sees no more than k positions gets them all; unused places at the end hold -1.
    """
    assert logits.dim() == 2, (logits.shape, k)
    assert k > 0, (logits.shape, k)
    if last is not None:
        assert last.shape == logits.shape[:1], last.shape
    if logits.is_cuda:
        from . import launch

        if use_kernel("topk_select", "cuda", launch.unserved(logits, k)):
            return launch.topk_select(logits, k, last, first)
    return reference.topk_select(logits, k, last, first)
