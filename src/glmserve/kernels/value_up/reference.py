# SPDX-License-Identifier: Apache-2.0
"""o[r, h] = W_UV[h] o_latent[r, h]."""

from __future__ import annotations

import torch


def value_up(latent: torch.Tensor, w_uv: torch.Tensor) -> torch.Tensor:
    return torch.bmm(latent.transpose(0, 1), w_uv.transpose(1, 2)).transpose(0, 1).flatten(1)
