# SPDX-License-Identifier: Apache-2.0
"""One decoder layer between two boundaries, used by the target and by the MTP layer alike.

It takes a normed input and the residual stream, and leaves both for whatever follows: the norm at
its end belongs to the next layer, or to the end of the model, and is passed in.
"""

from __future__ import annotations

from torch import Tensor

from glmserve.checkpoint.weights import LayerWeights, MoeWeights
from glmserve.kernels.linear import QuantWeight
from glmserve.kernels.residual_norm import Normed
from glmserve.kernels.router import ChoiceCount
from glmserve.model.attention import Attention
from glmserve.model.caches import LayerCache
from glmserve.model.mlp import mlp
from glmserve.model.moe import moe
from glmserve.model.step import Selection, Step
from glmserve.model.taps import Taps
from glmserve.model_config import ModelConfig
from glmserve.parallel.collectives import all_reduce_residual_rms_norm
from glmserve.parallel.group import Group


class DecoderLayer:
    """Attention and feed-forward of one layer on this rank."""

    def __init__(
        self, config: ModelConfig, weights: LayerWeights, group: Group, latent_norm_eps: float
    ) -> None:
        self.config, self.weights, self.group = config, weights, group
        self.attention = Attention(config, weights.attention, group, latent_norm_eps)
        self._totals: Tensor | None = None  # [E] of the experts chosen here, when counted
        self._padding = -1
        self.reads_fp8 = isinstance(weights.attention.a_proj, QuantWeight)
        first = weights.ffn.shared if isinstance(weights.ffn, MoeWeights) else weights.ffn
        self.ffn_reads_fp8 = isinstance(first.gate_up, QuantWeight) or isinstance(
            weights.ffn.gate_up, QuantWeight
        )

    @property
    def routed(self) -> bool:
        return isinstance(self.weights.ffn, MoeWeights)

    def count_choices(self, totals: Tensor, padding: int) -> None:
        """From now on: counts in totals [E] int64 the experts chosen by rows of other sequences
        than `padding`."""
        self._totals, self._padding = totals, padding

    def _count(self, step: Step) -> ChoiceCount | None:
        if self._totals is None:
            return None
        return ChoiceCount(self._totals, step.batch.row_seq, self._padding)

    def forward(
        self,
        normed: Normed,
        residual: Tensor,
        step: Step,
        cache: LayerCache,
        selection: Selection | None,
        next_norm: Tensor,
        next_reads_fp8: bool,
        write_index: bool = True,
        taps: Taps | None = None,
    ) -> tuple[Normed, Tensor, Selection]:
        """[R, D] normed input and residual -> (normed by `next_norm`, residual, selection used).

        `selection` None makes the layer score for itself (full layers). next_reads_fp8: whoever
        takes the result has block-fp8 weights.
        """
        c, w = self.config, self.weights
        partial, selection = self.attention.forward(
            normed, step, cache, selection, write_index, taps
        )
        normed, residual = all_reduce_residual_rms_norm(
            self.group, partial, residual, w.post_norm, c.rms_norm_eps, self.ffn_reads_fp8
        )
        if isinstance(w.ffn, MoeWeights):
            partial, routing = moe(normed, w.ffn, c, taps, self._count(step))
        else:
            partial, routing = mlp(normed, w.ffn), None
        normed, residual = all_reduce_residual_rms_norm(
            self.group, partial, residual, next_norm, c.rms_norm_eps, next_reads_fp8
        )
        if taps is not None:
            taps.record(residual, selection, routing)
        return normed, residual, selection
