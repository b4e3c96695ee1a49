# SPDX-License-Identifier: Apache-2.0
"""Value up-projection of absorbed attention: per head, latent output times W_UV."""

from __future__ import annotations

import torch

from ..dispatch import use_kernel
from ..quantise import GROUP, QuantRows, quantise
from . import reference

FEW = 64  # rows whose values are quantised by a kernel of their own


def value_up(latent: torch.Tensor, w_uv: torch.Tensor) -> torch.Tensor:
    """[R, H, kv_lora] x [H, v_dim, kv_lora] -> [R, H * v_dim], the input of o_proj."""
    assert latent.shape[1] == w_uv.shape[0], latent.shape
    assert latent.shape[2] == w_uv.shape[2], latent.shape
    if latent.is_cuda:
        from . import kernel

        if use_kernel("value_up", "cuda", kernel.unserved(latent, w_uv)):
            return kernel.value_up(latent, w_uv)
    return reference.value_up(latent, w_uv)


def value_up_quantised(latent: torch.Tensor, w_uv: torch.Tensor) -> QuantRows:
    """quantise(value_up(latent, w_uv)), of many rows in one pass: a few have too few whole groups
    of 128 columns to fill the card."""
    if latent.is_cuda and len(latent) > FEW and w_uv.shape[1] % GROUP == 0:
        from . import kernel

        if use_kernel("value_up", "cuda", kernel.unserved(latent, w_uv)):
            return kernel.value_up_quantised(latent, w_uv)
    return quantise(value_up(latent, w_uv))
