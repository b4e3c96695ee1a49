# SPDX-License-Identifier: Apache-2.0
"""What follows the fused A-projection of an attention layer: split, norms, RoPE, cache writes.

One projection of the layer's input gives [q latent | kv latent | shared rope key] and, where the
layer owns an indexer, [index key | index head weights] behind them. This operator norms the two
latents, ropes the shared key, layer-norms and ropes the index key, and writes both paged caches.
Not its job: the query heads (`query_side`).
"""

from __future__ import annotations

import torch

from ..dispatch import use_kernel
from ..quantise.reference import GROUP, quantise
from ..residual_norm import Normed
from . import reference
from .reference import IndexKeyNorm

__all__ = ["IndexKeyNorm", "latent_inputs"]


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
    quantised: bool = False,
) -> Normed:
    """Writes row r into cache slot slots[r] and returns the normed q latent [R, q_lora_rank].

    projected     [R, >= q_lora + kv_lora + rope (+ index_dim)]
    q_norm        [q_lora], kv_norm [kv_lora]: RMSNorm weights, both with `eps`
    rope          [R, rope / 2, 2] acc, (cos, sin) of the rows' positions
    slots         [R] int64, distinct but for padding rows, which share the scratch page
    latent_cache  [slots, kv_lora + rope]: normed latent, then the roped (not normed) shared key;
                  or uint8 [slots, 656] (see `quant`)
    index_cache   [slots, index_dim] or None when this pass writes no index keys;
                  its first `rope` dimensions are roped; or uint8 [slots, 132] (see `quant`)
    index_projected  [C, R, >= index_dim]: the index key's projection as `linear_parts` gives it,
                  where it does not stand behind the latents' in `projected`
    quantised     asks for the q latent (q_lora a multiple of 128) in fp8 beside the rows
    """
    rows, width = projected.shape
    rope_dim = 2 * rope.shape[1]
    used = q_norm.shape[0] + kv_norm.shape[0] + rope_dim
    fp8 = latent_cache.dtype == torch.uint8
    assert fp8 or latent_cache.shape[1] == kv_norm.shape[0] + rope_dim, latent_cache.shape
    assert slots.shape == (rows,)
    assert rope.shape[0] == rows
    assert not quantised or q_norm.shape[0] % GROUP == 0, q_norm.shape
    assert (index_cache is None) == (index_norm is None)
    if index_cache is not None:
        assert index_norm is not None
        if index_projected is None:
            used += index_norm.weight.shape[0]
        assert index_cache.shape[1] >= rope_dim, index_cache.shape
    assert width >= used, (width, used)
    if projected.is_cuda:
        from . import kernel

        odd = kernel.unserved(projected, q_norm, kv_norm, rope, latent_cache, index_cache)
        if use_kernel("latent_inputs", "cuda", odd):
            return kernel.latent_inputs(
                projected, q_norm, kv_norm, rope, slots, latent_cache, index_cache, index_norm, eps,
                index_projected, quantised,
            )  # fmt: skip
    q_latent = reference.latent_inputs(
        projected, q_norm, kv_norm, rope, slots, latent_cache, index_cache, index_norm, eps,
        index_projected,
    )  # fmt: skip
    return Normed(q_latent, quantise(q_latent) if quantised else None)
