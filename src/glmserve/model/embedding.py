# SPDX-License-Identifier: Apache-2.0
"""The vocabulary's two ends on one rank: shared embedding lookups and the head's column share."""

from __future__ import annotations

from torch import Tensor

from glmserve.checkpoint.weights import ModelWeights
from glmserve.kernels.residual_norm import Normed
from glmserve.kernels.vocabulary import embed_shard, head_shard
from glmserve.parallel.collectives import all_reduce_residual_rms_norm
from glmserve.parallel.group import Group


class Vocabulary:
    """Rank r holds ids [r * V / N, (r + 1) * V / N) of the embedding and of the head."""

    def __init__(self, weights: ModelWeights, group: Group) -> None:
        self.weights, self.group = weights, group
        self.first = group.rank * weights.embedding.shape[0]

    def embed(self, tokens: Tensor, norm: Tensor, eps: float) -> Tensor:
        """[R] int64 -> [R, D] on every rank. Exact: one rank has the row, the others add zeros.

        norm [D], eps: of the kernel that adds up ranks, whose normed rows are not used here.
        """
        shard = embed_shard(tokens, self.weights.embedding, self.first)
        if self.group.size == 1:
            return shard
        return all_reduce_residual_rms_norm(self.group, shard, None, norm, eps)[1]

    def embed_normed(
        self, tokens: Tensor, norm: Tensor, eps: float, quantised: bool
    ) -> tuple[Normed, Tensor]:
        """The same rows behind an RMSNorm, and as they are: a layer's input and the residual."""
        shard = embed_shard(tokens, self.weights.embedding, self.first)
        return all_reduce_residual_rms_norm(self.group, shard, None, norm, eps, quantised)

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, D] -> [R, V / N] acc: the rank's ids only."""
        return head_shard(hidden, self.weights.head)
