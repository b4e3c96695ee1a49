# SPDX-License-Identifier: Apache-2.0
"""The indexer of a full layer: scores, top-k, and the group's physical slots.

Replicated on every rank and fed bit-identical inputs, so all ranks select the same positions. Its
keys are written with the layer's latents (`attention`); here they are only read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from glmserve.checkpoint.weights import IndexerWeights
from glmserve.config import MOST_SCORES
from glmserve.kernels.index_logits import index_logits
from glmserve.kernels.linear import linear
from glmserve.kernels.quantise import QuantRows
from glmserve.kernels.query_side import index_query
from glmserve.kernels.topk_select import topk_select
from glmserve.model.step import Selection, Step
from glmserve.model_config import ModelConfig
from glmserve.parallel.group import Group

SPLIT_ROWS = 512  # rows of a prefill step from which on ranks score a share of them each


class Indexer:
    """The index heads of one full layer, whole on every rank."""

    def __init__(self, config: ModelConfig, weights: IndexerWeights, group: Group) -> None:
        self.config, self.weights, self.group = config, weights, group

    def select(
        self, q_latent: Tensor | QuantRows, head_weights: Tensor, index_k: Tensor, step: Step
    ) -> Selection:
        """Scores each row (q_latent [R, q_lora] normed, in fp8 for a block-fp8 wq_b; head_weights
        [C, R, Hi] raw, in parts) against the keys that it sees and keeps the best index_topk.

        Long prefill steps are scored in shares, one a rank; a row's scores do not depend on the
        rows beside it, so the positions are the same as those of one rank.
        """
        batch, rows, ranks = step.batch, head_weights.shape[1], self.group.size
        if ranks == 1 or rows < SPLIT_ROWS or batch.rows_per_sequence is not None:
            positions = self._positions(q_latent, head_weights, index_k, step, slice(0, rows))
        else:
            share = -(-rows // ranks)
            start = min(self.group.rank * share, rows - share)  # the last share may overlap
            own = self._positions(
                q_latent, head_weights, index_k, step, slice(start, start + share)
            )
            parts = self.group.all_gather(own)
            last = parts[-1][ranks * share - rows :]
            positions = torch.cat((parts[:-1].flatten(0, 1), last))
        return Selection(positions, batch.slots(positions))

    def _positions(
        self,
        q_latent: Tensor | QuantRows,
        head_weights: Tensor,
        index_k: Tensor,
        step: Step,
        some: slice,
    ) -> Tensor:
        """Of the rows in `some`: [n, k] int32."""
        c, batch = self.config, step.batch
        if isinstance(q_latent, QuantRows):
            scales = q_latent.scales[:, some].contiguous()
            q_latent = QuantRows(q_latent.values[some], scales)
        else:
            q_latent = q_latent[some]
        query = linear(q_latent, self.weights.wq_b).view(-1, c.index_n_heads, c.index_head_dim)
        query, scaled = index_query(
            query, head_weights[:, some], step.rope[some], fp8=index_k.dtype == torch.uint8
        )
        # Scores of long contexts come in parts; a part holds whole sequences of a decode step.
        unit = batch.rows_per_sequence or 1
        most = max(unit, MOST_SCORES // step.max_context // unit * unit)
        parts = [
            self._best(query, scaled, index_k, step, some.start, slice(at, at + most))
            for at in range(0, len(query), most)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _best(
        self,
        query: Tensor,
        scaled: Tensor,
        index_k: Tensor,
        step: Step,
        first_row: int,
        part: slice,
    ) -> Tensor:
        """Positions of the queries in `part`, the first query being row `first_row`'s."""
        batch = step.batch
        rows = slice(first_row + part.start, first_row + min(part.stop, len(query)))
        last, row_seq = _aligned(step.last[rows]), _aligned(batch.row_seq[rows])
        logits = index_logits(
            query[part],
            scaled[part],
            index_k,
            batch.page_table,
            row_seq,
            last,
            step.first,
            batch.page_size,
            step.max_context,
            batch.rows_per_sequence,
            fill=False,
        )
        return topk_select(logits, self.config.index_topk, last, step.first)


def _aligned(x: Tensor) -> Tensor:
    """x, copied where it starts between multiples of 16 bytes: kernels compiled for aligned
    pointers would be compiled anew for it, in the middle of serving."""
    return x if x.data_ptr() % 16 == 0 else x.clone()
