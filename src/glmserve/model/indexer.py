# SPDX-License-Identifier: Apache-2.0
"""The indexer of a full layer: scores, top-k, and the group's physical slots.

Replicated on every rank and fed bit-identical inputs, so all ranks select the same positions. Its
keys are written with the layer's latents (`attention`); here they are only read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from glmserve.checkpoint.weights import IndexerWeights
from glmserve.kernels.index_logits import index_logits
from glmserve.kernels.linear import QuantWeight, linear
from glmserve.kernels.quantise import QuantRows
from glmserve.kernels.query_side import index_query
from glmserve.kernels.topk_select import topk_select
from glmserve.model.step import Selection, Step
from glmserve.model_config import ModelConfig


class Indexer:
    def __init__(self, config: ModelConfig, weights: IndexerWeights) -> None:
        self.config, self.weights = config, weights
        self.reads_fp8 = isinstance(weights.wq_b, QuantWeight)

    def select(
        self, q_latent: Tensor | QuantRows, head_weights: Tensor, index_k: Tensor, step: Step
    ) -> Selection:
        """Scores each row (q_latent [R, q_lora] normed, in fp8 for a block-fp8 wq_b; head_weights
        [R, Hi] raw) against the keys that it sees and keeps the best index_topk."""
        c, batch = self.config, step.batch
        query = linear(q_latent, self.weights.wq_b).view(-1, c.index_n_heads, c.index_head_dim)
        query, scaled = index_query(
            query, head_weights, step.rope, fp8=index_k.dtype == torch.uint8
        )
        logits = index_logits(
            query,
            scaled,
            index_k,
            batch.page_table,
            batch.row_seq,
            step.last,
            step.first,
            batch.page_size,
            step.max_context,
            batch.rows_per_sequence,
            fill=False,
        )
        positions = topk_select(logits, c.index_topk, step.last, step.first)
        return Selection(positions, batch.slots(positions))
