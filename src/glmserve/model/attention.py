# SPDX-License-Identifier: Apache-2.0
"""Absorbed sparse attention of one layer: the rank's heads over the index group's selection.

The A-projection and both caches are the same on every rank; heads are divided, so the result is a
partial sum for the layer boundary. Not its job: that sum, and the selection of shared layers, which
comes from the full layer before them.
"""

from __future__ import annotations

from torch import Tensor

from glmserve.checkpoint.weights import AttentionWeights
from glmserve.kernels.latent_inputs import IndexKeyNorm, latent_inputs
from glmserve.kernels.linear import linear
from glmserve.kernels.query_side import absorb_query
from glmserve.kernels.sparse_mla import sparse_mla
from glmserve.kernels.value_up import value_up
from glmserve.model.caches import LayerCache
from glmserve.model.indexer import Indexer
from glmserve.model.step import Selection, Step
from glmserve.model_config import ModelConfig


class Attention:
    def __init__(
        self, config: ModelConfig, weights: AttentionWeights, latent_norm_eps: float
    ) -> None:
        self.config, self.weights, self.latent_norm_eps = config, weights, latent_norm_eps
        self.w_uk = weights.kv_b[:, : config.qk_nope_head_dim]  # [H, nope, kv_lora]
        self.w_uv = weights.kv_b[:, config.qk_nope_head_dim :]  # [H, v, kv_lora]
        self.scale = config.qk_head_dim**-0.5  # of the unabsorbed head: absorption keeps the dot
        self.latent_width = config.q_lora_rank + config.latent_dim
        self.indexer: Indexer | None = None
        self.index_norm: IndexKeyNorm | None = None
        if weights.indexer is not None:
            self.indexer = Indexer(config, weights.indexer)
            self.index_norm = IndexKeyNorm(
                weights.indexer.k_norm_weight, weights.indexer.k_norm_bias
            )

    def forward(
        self,
        x: Tensor,
        step: Step,
        cache: LayerCache,
        selection: Selection | None,
        write_index: bool = True,
    ) -> tuple[Tensor, Selection]:
        """x [R, D] normed -> (this rank's partial [R, D], the selection used).

        With `selection` given nothing is scored. A layer with an indexer still writes its index
        keys unless `write_index` is False; scoring needs them written.
        """
        c, w = self.config, self.weights
        index_keys = self.indexer is not None and write_index
        projected = linear(x, w.a_proj if index_keys else w.a_proj[: self.latent_width])
        q_latent = latent_inputs(
            projected,
            w.q_norm,
            w.kv_norm,
            step.rope,
            step.own_slots,
            cache.latent,
            cache.index_k if index_keys else None,
            self.index_norm if index_keys else None,
            self.latent_norm_eps,
        )
        if selection is None:
            assert index_keys, "a pass that scores writes its index keys first"
            assert self.indexer is not None
            assert cache.index_k is not None
            head_weights = projected[:, self.latent_width + c.index_head_dim :]
            selection = self.indexer.select(q_latent, head_weights, cache.index_k, step)
        query = linear(q_latent, w.q_b).view(len(x), -1, c.qk_head_dim)
        query = absorb_query(query, self.w_uk, step.rope)
        latent = sparse_mla(query, cache.latent, selection.slots, c.kv_lora_rank, self.scale)
        return linear(value_up(latent, self.w_uv), w.o_proj), selection
