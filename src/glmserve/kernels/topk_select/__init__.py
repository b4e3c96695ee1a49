# SPDX-License-Identifier: Apache-2.0
"""The largest index scores of each row, as positions; ties go to the lower position."""

from __future__ import annotations

import torch

from . import reference


def topk_select(logits: torch.Tensor, k: int) -> torch.Tensor:
    """[R, context] scores, -inf where hidden -> [R, min(k, context)] int32 positions, ascending.

    A row that sees no more than k positions gets them all; unused places at the end hold -1.
    """
    assert logits.dim() == 2, (logits.shape, k)
    assert k > 0, (logits.shape, k)
    return reference.topk_select(logits, k)
