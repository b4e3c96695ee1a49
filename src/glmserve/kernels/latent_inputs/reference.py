# SPDX-License-Identifier: Apache-2.0
"""cq = rms(q); cache[slot] = [rms(kv) | rope(k)]; index[slot] = rope(LayerNorm(kI))."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..linear.reference import added
from ..precision import acc_dtype
from ..quant import pack_latent_rows, write_index_rows
from ..residual_norm.reference import rms_norm
from ..rope.reference import rotate


class IndexKeyNorm(NamedTuple):
    """LayerNorm of the index key: subtracts the mean and has a bias; its eps is its own."""

    weight: torch.Tensor  # [index_dim]
    bias: torch.Tensor  # [index_dim]
    eps: float = 1e-6


def latent_inputs(
    projected: torch.Tensor,
    q_norm: torch.Tensor,
    kv_norm: torch.Tensor,
    rope: torch.Tensor,
    slots: torch.Tensor,
    latent_cache: torch.Tensor,
    index_cache: torch.Tensor | None,
    index_norm: IndexKeyNorm | None,
    eps: float,
    index_projected: torch.Tensor | None = None,
) -> torch.Tensor:
    q_dim, kv_dim, rope_dim = q_norm.shape[0], kv_norm.shape[0], 2 * rope.shape[1]
    q_latent, kv_latent, k_rope, rest = torch.split(
        projected, [q_dim, kv_dim, rope_dim, projected.shape[1] - q_dim - kv_dim - rope_dim], dim=-1
    )
    dtype = projected.dtype
    key_part = rotate(k_rope, rope).to(dtype)
    if latent_cache.dtype == torch.uint8:  # quantised from the unrounded latent
        row = pack_latent_rows(rms_norm(kv_latent.float(), kv_norm.float(), eps), key_part)
    else:
        row = torch.cat((rms_norm(kv_latent, kv_norm, eps), key_part), -1)
    latent_cache.index_copy_(0, slots.long(), row)
    if index_cache is not None and index_norm is not None:
        rest = rest if index_projected is None else added(index_projected, dtype)
        key = layer_norm(rest[:, : index_norm.weight.shape[0]], index_norm)
        key = torch.cat((rotate(key[:, :rope_dim], rope), key[:, rope_dim:]), -1)
        if index_cache.dtype == torch.uint8:
            write_index_rows(index_cache, slots, key.float())
        else:
            index_cache.index_copy_(0, slots.long(), key.to(dtype))
    return rms_norm(q_latent, q_norm, eps)


def layer_norm(x: torch.Tensor, norm: IndexKeyNorm) -> torch.Tensor:
    """LayerNorm in acc, not yet rounded to x's dtype: RoPE follows and one cast is enough."""
    acc = acc_dtype(x.dtype)
    wide = x.to(acc)
    wide = wide - wide.mean(-1, keepdim=True)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
    return wide * scale * norm.weight.to(acc) + norm.bias.to(acc)
