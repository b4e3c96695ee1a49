# SPDX-License-Identifier: Apache-2.0
"""The target model on one rank: embedding, all layers with their index groups, final norm, head.

Not its job: choosing tokens (`runtime`), the MTP layer (`mtp`).
"""

from __future__ import annotations

from torch import Tensor

from glmserve.checkpoint.weights import ModelWeights
from glmserve.model.batch import StepBatch
from glmserve.model.caches import Caches
from glmserve.model.embedding import Vocabulary
from glmserve.model.layer import DecoderLayer
from glmserve.model.step import Selection, Step
from glmserve.model.taps import Taps
from glmserve.model_config import ModelConfig
from glmserve.parallel.group import Group


class Decoder:
    """All ranks call `forward` with the same batch; it writes the caches and returns the same."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        group: Group,
        latent_norm_eps: float = 1e-5,
    ) -> None:
        """`latent_norm_eps` is that of the q and kv latent norms: engines use 1e-5, transformers
        1e-6."""
        self.config, self.weights = config, weights
        self.vocabulary = Vocabulary(weights, group)
        self.layers = [DecoderLayer(config, w, group, latent_norm_eps) for w in weights.layers]
        self.norms = [w.input_norm for w in weights.layers[1:]] + [weights.norm]  # after each layer
        self.next_reads_fp8 = [layer.reads_fp8 for layer in self.layers[1:]] + [False]

    def forward(self, batch: StepBatch, caches: Caches, taps: Taps | None = None) -> Tensor:
        """Hidden states [R, D] after the final norm."""
        step = Step.of(batch, self.config, self.weights.norm.dtype, shift=0)
        normed, residual = self.vocabulary.embed_normed(
            batch.tokens,
            self.weights.layers[0].input_norm,
            self.config.rms_norm_eps,
            self.layers[0].reads_fp8,
        )
        selection: Selection | None = None
        for i, layer in enumerate(self.layers):
            normed, residual, selection = layer.forward(
                normed,
                residual,
                step,
                caches.layers[i],
                None if self.config.is_full(i) else selection,
                self.norms[i],
                self.next_reads_fp8[i],
                taps=taps,
            )
        return normed.rows

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, D] -> this rank's vocabulary columns [R, V / N], fp32 (fp64 when run in fp64)."""
        return self.vocabulary.logits(hidden)
