# SPDX-License-Identifier: Apache-2.0
"""A stable descending sort puts the lower of two tied positions first; kept ascending."""

from __future__ import annotations

import torch


def topk_select(
    logits: torch.Tensor, k: int, last: torch.Tensor | None = None, first: int = 0
) -> torch.Tensor:
    context = logits.shape[1]
    if last is not None:
        place = torch.arange(context, device=logits.device)
        logits = logits.masked_fill((place > last[:, None]) | (place < first), -torch.inf)
    if context > k:
        kept = logits.sort(dim=-1, descending=True, stable=True).indices[:, :k]
        hidden = logits.gather(1, kept).isneginf()
        kept = kept.masked_fill_(hidden, context).sort(dim=-1).values
    else:
        everything = torch.arange(context, device=logits.device).expand_as(logits)
        kept = everything.masked_fill(logits.isneginf(), context).sort(dim=-1).values
    return kept.masked_fill_(kept == context, -1).to(torch.int32)
