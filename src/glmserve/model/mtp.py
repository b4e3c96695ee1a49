# SPDX-License-Identifier: Apache-2.0
"""The multi-token-prediction layer: a full decoder layer fed with (hidden i, token i + 1).

Its output, after its own final norm, goes through the main head to predict token i + 2, and is the
hidden state of the next draft pass. Not its job: which rows draft, or accepting drafts (`runtime`).
"""

from __future__ import annotations

from torch import Tensor

from glmserve.checkpoint.weights import ModelWeights
from glmserve.kernels.linear import linear
from glmserve.kernels.mtp_input import mtp_input
from glmserve.model.batch import StepBatch
from glmserve.model.caches import Caches
from glmserve.model.embedding import Vocabulary
from glmserve.model.layer import DecoderLayer
from glmserve.model.step import Selection, Step
from glmserve.model.taps import Taps
from glmserve.model_config import ModelConfig
from glmserve.parallel.collectives import all_reduce_residual_rms_norm
from glmserve.parallel.group import Group


class Mtp:
    """The MTP layer on this rank, whose weights must have been loaded with it."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        group: Group,
        latent_norm_eps: float = 1e-5,
    ) -> None:
        assert weights.mtp is not None, "the weights were loaded without the MTP layer"
        self.config, self.weights, self.group = config, weights.mtp, group
        self.vocabulary = Vocabulary(weights, group)
        self.layer = DecoderLayer(config, self.weights.layer, group, latent_norm_eps)
        share = self.weights.eh_proj.shape[1]
        self.columns = slice(group.rank * share, (group.rank + 1) * share)

    def forward(
        self,
        batch: StepBatch,
        next_tokens: Tensor,
        hidden: Tensor,
        caches: Caches,
        selection: Selection | None,
        write_index: bool,
        taps: Taps | None = None,
    ) -> tuple[Tensor, Selection]:
        """One draft pass over R rows; batch.tokens is not read.

        batch        row r stands at position i = batch.positions[r]; its entry is written to the
                     slot of i + 1 with RoPE position i and sees entries up to itself
        next_tokens  [R] int64, token i + 1
        hidden       [R, D], of position i after the target's final norm, or a previous pass's
                     output when drafting on
        selection    None: score (write_index must be True). Given: use it, one row for each of R,
                     in the MTP layer's cache coordinates (as this method returned it)
        -> (output [R, D] for `Decoder.logits` and the next pass, selection used)
        """
        assert caches.mtp is not None
        c, w = self.config, self.weights
        step = Step.of(batch, c, hidden.dtype, shift=1)
        eps = c.rms_norm_eps
        embedding = self.vocabulary.embed(next_tokens, w.embedding_norm, eps)
        joined = mtp_input(embedding, hidden, w.embedding_norm, w.hidden_norm, eps, self.columns)
        normed, residual = all_reduce_residual_rms_norm(
            self.group,
            linear(joined, w.eh_proj),
            None,
            w.layer.input_norm,
            eps,
            self.layer.reads_fp8,
        )
        out, _, selection = self.layer.forward(
            normed, residual, step, caches.mtp, selection, w.norm, False, write_index, taps
        )
        return out.rows, selection
