# SPDX-License-Identifier: Apache-2.0
"""Attention of one layer: the rank's heads over the index group's selection, absorbed; or, for
prefill rows that the index would not thin out, over everything before them, unabsorbed.

The A-projection and both caches are the same on every rank; heads are divided, so the result is a
partial sum for the layer boundary. Not its job: that sum, and the selection of shared layers, which
comes from the full layer before them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from glmserve.checkpoint.weights import AttentionWeights
from glmserve.kernels.dense_mla import dense_mla
from glmserve.kernels.latent_inputs import IndexKeyNorm, latent_inputs
from glmserve.kernels.linear import QuantWeight, linear, linear_parts
from glmserve.kernels.quantise import QuantRows
from glmserve.kernels.query_side import absorb_query
from glmserve.kernels.residual_norm import Normed
from glmserve.kernels.sparse_mla import sparse_mla
from glmserve.kernels.value_up import value_up, value_up_quantised
from glmserve.model.batch import DenseRows
from glmserve.model.caches import LayerCache
from glmserve.model.indexer import Indexer
from glmserve.model.step import Selection, Step
from glmserve.model.taps import Taps
from glmserve.model_config import ModelConfig
from glmserve.parallel.group import Group


class Attention:
    """A layer's attention on this rank's heads, and the writing of its cache entries."""

    def __init__(
        self,
        config: ModelConfig,
        weights: AttentionWeights,
        group: Group,
        latent_norm_eps: float,
    ) -> None:
        self.config, self.weights, self.latent_norm_eps = config, weights, latent_norm_eps
        self.w_uk = weights.kv_b[:, : config.qk_nope_head_dim]  # [H, nope, kv_lora]
        self.w_uv = weights.kv_b[:, config.qk_nope_head_dim :]  # [H, v, kv_lora]
        self.scale = config.qk_head_dim**-0.5  # of the unabsorbed head: absorption keeps the dot
        self.indexer: Indexer | None = None
        self.index_norm: IndexKeyNorm | None = None
        if weights.indexer is not None:
            self.indexer = Indexer(config, weights.indexer, group)
            self.index_norm = IndexKeyNorm(
                weights.indexer.k_norm_weight, weights.indexer.k_norm_bias
            )

    def forward(
        self,
        x: Normed,
        step: Step,
        cache: LayerCache,
        selection: Selection | None,
        write_index: bool = True,
        taps: Taps | None = None,
    ) -> tuple[Tensor, Selection]:
        """x [R, D] normed -> (this rank's partial [R, D], the selection used).

        With `selection` given nothing is scored. A layer with an indexer still writes its index
        keys unless `write_index` is False; scoring needs them written.
        """
        c, w = self.config, self.weights
        index_projected: Tensor | None = None
        if w.indexer is not None and write_index:
            index_projected = linear_parts(x.rows, w.indexer.proj)
        q_latent = latent_inputs(
            linear(x.for_weight(w.a_proj), w.a_proj),
            w.q_norm,
            w.kv_norm,
            step.rope,
            step.own_slots,
            cache.latent,
            None if index_projected is None else cache.index_k,
            None if index_projected is None else self.index_norm,
            self.latent_norm_eps,
            index_projected,
            isinstance(w.q_b, QuantWeight),  # the indexer's wq_b is stored alike
        )
        if selection is None:
            assert index_projected is not None, "a pass that scores writes its index keys first"
            assert w.indexer is not None
            assert self.indexer is not None
            assert cache.index_k is not None
            head_weights = index_projected[:, :, c.index_head_dim :]
            selection = self.indexer.select(
                q_latent.for_weight(w.indexer.wq_b), head_weights, cache.index_k, step
            )
            if taps is not None:
                selection = taps.selected(selection, step)
        query = linear(q_latent.for_weight(w.q_b), w.q_b).view(
            len(q_latent.rows), -1, c.qk_head_dim
        )
        return linear(self._values(query, step, cache, selection), w.o_proj), selection

    def _values(
        self, query: Tensor, step: Step, cache: LayerCache, selection: Selection
    ) -> Tensor | QuantRows:
        """[R, H * v], the heads' results; in fp8 where o_proj reads that and none are dense."""
        dense = [c for c in step.batch.dense if c.context <= self.config.index_topk]
        if not dense:
            latent = self._sparse(query, step, cache, selection, slice(0, len(query)))
            quantised = isinstance(self.weights.o_proj, QuantWeight)
            return (value_up_quantised if quantised else value_up)(latent, self.w_uv)
        attended: list[Tensor] = []
        at = 0
        for chunk in [*dense, DenseRows(len(query), 0, 0, 0)]:
            if chunk.first > at:
                latent = self._sparse(query, step, cache, selection, slice(at, chunk.first))
                attended.append(value_up(latent, self.w_uv))
            if chunk.rows:
                attended.append(self._dense(query, step, cache, chunk))
            at = chunk.first + chunk.rows
        return attended[0] if len(attended) == 1 else torch.cat(attended)

    def _sparse(
        self, query: Tensor, step: Step, cache: LayerCache, selection: Selection, some: slice
    ) -> Tensor:
        """[n, H, kv_lora] of rows that attend to their selections, absorbed."""
        return sparse_mla(
            absorb_query(query[some], self.w_uk, step.rope[some]),
            cache.latent,
            selection.slots[some],
            self.config.kv_lora_rank,
            self.scale,
        )

    def _dense(self, query: Tensor, step: Step, cache: LayerCache, chunk: DenseRows) -> Tensor:
        """[n, H * v] of rows whose selections would be everything before them."""
        some = slice(chunk.first, chunk.first + chunk.rows)
        return dense_mla(
            query[some],
            step.rope[some],
            cache.latent,
            step.batch.page_table,
            chunk.line,
            self.weights.kv_b,
            chunk.context + step.first,
            step.first,
            self.scale,
            step.batch.page_size,
        )
