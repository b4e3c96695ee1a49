# SPDX-License-Identifier: Apache-2.0
"""The vocabulary's two ends on one rank: shared embedding lookups and the head's column share."""

from __future__ import annotations

from torch import Tensor

from glmserve.checkpoint.weights import ModelWeights
from glmserve.kernels.vocabulary import embed_shard, head_shard
from glmserve.parallel.group import Group


class Vocabulary:
    """Rank r holds ids [r * V / N, (r + 1) * V / N) of the embedding and of the head."""

    def __init__(self, weights: ModelWeights, group: Group) -> None:
        self.weights, self.group = weights, group
        self.first = group.rank * weights.embedding.shape[0]

    def embed(self, tokens: Tensor) -> Tensor:
        """[R] int64 -> [R, D] on every rank. Exact: one rank has the row, the others add zeros."""
        return self.group.all_reduce(embed_shard(tokens, self.weights.embedding, self.first))

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, D] -> [R, V / N] acc: the rank's ids only."""
        return head_shard(hidden, self.weights.head)
