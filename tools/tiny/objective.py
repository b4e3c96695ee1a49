# SPDX-License-Identifier: Apache-2.0
"""One training pass: next-token loss, recycled MTP losses, and what the indexers learn from.

The indexers' loss is DeepSeek-V3.2's: the divergence from the attention, averaged over the heads
and layers that will use the selection, to the softmax of the scores, over what the row attends to:
everything in the dense warm-up, the selected set afterwards. Their inputs are detached, so neither
loss sees the other's parameters. Later MTP passes attend to the first pass's entries with its
selection, as serving does (`index_share_for_mtp_iteration`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.tiny.twin import Layer, Scope, Twin, causal_bias, rms, rope_of, select

MTP_PASSES = 3


@dataclass
class Pass:
    """What a pass gives: scalars by name, and the routers' loads by layer."""

    hidden: Tensor  # [B, T, D] after the final norm
    drafts: list[Tensor] = field(default_factory=list)  # a pass's output [b, T, D]
    divergence: list[Tensor] = field(default_factory=list)  # a full layer's KL
    loads: dict[int, Tensor] = field(default_factory=dict)


@dataclass
class Batch:
    ids: Tensor  # [B, T] int64
    positions: Tensor  # [B, T] int64
    documents: Tensor  # [B, T] int64
    weights: Tensor  # [B, T] fp32, of predicting that token


class Runner:
    """Runs the twin; `wrap` may compile the layers' dense parts."""

    def __init__(
        self,
        twin: Twin,
        dtype: torch.dtype,
        wrap: Callable[[Any], Any] = lambda f: f,
    ) -> None:
        self.twin, self.dtype = twin, dtype
        self.before = wrap(_before)
        self.after = wrap(_after)
        self.query = wrap(_query)
        self.losses = wrap(weighted_loss)
        self.scores = wrap(_scores)
        self.divergence = wrap(_divergence)
        self.select = wrap(select)

    def forward(
        self, batch: Batch, sparse: int = 0, probed: slice | None = None, drafting: int = 0
    ) -> Pass:
        """Rows [0, sparse) select; rows of `probed` teach; rows [0, drafting) run the MTP layer."""
        twin, c = self.twin, self.twin.config
        bias = causal_bias(batch.documents, self.dtype)
        rope = rope_of(c, batch.positions, self.dtype)
        scope = Scope(rope, bias, sparse, probed or slice(0, 0))
        h = F.embedding(batch.ids, twin.embed_tokens).to(self.dtype)
        out = Pass(h)
        group: _Group | None = None
        for number in range(c.num_hidden_layers):
            layer = twin.layers[number]
            assert isinstance(layer, Layer)
            if layer.full:
                self._finish(group, scope, out)
                group = None
            h, group = self._layer(layer, number, h, scope, group, out)
        self._finish(group, scope, out)
        out.hidden = rms(h, twin.norm, c.rms_norm_eps)
        if drafting:
            self._draft(batch, scope, drafting, out)
        return out

    def _layer(
        self,
        layer: Layer,
        number: int,
        h: Tensor,
        scope: Scope,
        group: _Group | None,
        out: Pass,
    ) -> tuple[Tensor, _Group]:
        x, latent, q, k, v = self.before(layer, h, scope.rope)
        if group is None:
            group = _Group(layer, x.detach(), latent.detach(), scope.bias, [])
            if scope.sparse:
                n = scope.sparse
                with torch.no_grad():
                    scores = self.scores(
                        layer.self_attn.indexer, group.x[:n], group.latent[:n], scope.rope[:n]
                    )
                    chosen = self.select(scores, scope.bias[:n], self.twin.config.index_topk)
                    group.bias = torch.cat((chosen, scope.bias[n:]))
        if scope.probed.stop:
            r = scope.probed
            group.attention.append(layer.self_attn.probabilities(q[r], k[r], group.bias[r]))
        h, load = self.after(layer, h, q, k, v, group.bias)
        if load is not None:
            out.loads[number] = load
        return h, group

    def _finish(self, group: _Group | None, scope: Scope, out: Pass) -> None:
        """The loss of a group's indexer, once all of its layers have shown their attention."""
        if group is None or not scope.probed.stop:
            return
        r = scope.probed
        target = torch.stack(group.attention).mean(0)
        scores = self.scores(
            group.owner.self_attn.indexer, group.x[r], group.latent[r], scope.rope[r]
        )
        out.divergence.append(self.divergence(target, scores, group.bias[r, 0]))

    def _draft(self, batch: Batch, scope: Scope, rows: int, out: Pass) -> None:
        """MTP passes over rows [0, rows): pass k predicts the token k + 1 ahead."""
        twin, layer, c = self.twin, self.twin.mtp, self.twin.config
        number = c.num_hidden_layers
        probed = slice(scope.probed.start, min(scope.probed.stop, rows))
        inner = Scope(scope.rope[:rows], scope.bias[:rows], min(scope.sparse, rows), probed)
        hidden, group, keys = out.hidden[:rows], None, None
        for k in range(1, MTP_PASSES + 1):
            following = batch.ids[:rows].roll(-k, 1)
            h = twin.mtp_input(following, hidden)
            if keys is None:
                x, latent, q, key, value = self.before(layer, h, inner.rope)
                keys = (key, value)
                group = _Group(layer, x.detach(), latent.detach(), inner.bias, [])
                if inner.sparse:
                    n = inner.sparse
                    with torch.no_grad():
                        scores = self.scores(
                            layer.self_attn.indexer, group.x[:n], group.latent[:n], inner.rope[:n]
                        )
                        chosen = self.select(scores, inner.bias[:n], c.index_topk)
                        group.bias = torch.cat((chosen, inner.bias[n:]))
            else:
                ahead = rope_of(c, batch.positions[:rows] + k - 1, self.dtype)
                q = self.query(layer, h, ahead)
            assert group is not None
            if inner.probed.stop > inner.probed.start:
                r = inner.probed
                group.attention.append(
                    layer.self_attn.probabilities(q[r], keys[0][r], group.bias[r])
                )
            h, load = self.after(layer, h, q, *keys, group.bias)
            if k == 1:
                out.loads[number] = load
            hidden = rms(h, twin.shared_head_norm, c.rms_norm_eps)
            out.drafts.append(hidden)
        if inner.probed.stop > inner.probed.start:
            self._finish(group, inner, out)


@dataclass
class _Group:
    """An index group on its way through its layers."""

    owner: Layer
    x: Tensor
    latent: Tensor
    bias: Tensor
    attention: list[Tensor]


def _before(layer: Layer, h: Tensor, rope: Tensor) -> tuple[Tensor, ...]:
    x = rms(h, layer.input_layernorm, layer.c.rms_norm_eps)
    latent, q = layer.self_attn.queries(x, rope)
    k, v = layer.self_attn.keys_values(x, rope)
    return x, latent, q, k, v


def _query(layer: Layer, h: Tensor, rope: Tensor) -> Tensor:
    x = rms(h, layer.input_layernorm, layer.c.rms_norm_eps)
    return layer.self_attn.queries(x, rope)[1]


def _after(
    layer: Layer, h: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor | None]:
    return layer.feed(h + layer.self_attn.attend(q, k, v, bias))


def _scores(indexer: torch.nn.Module, x: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
    out: Tensor = indexer(x, latent, rope)
    return out


def _divergence(target: Tensor, scores: Tensor, bias: Tensor) -> Tensor:
    """Mean KL(target || softmax(scores)) over rows; all [b, T, T]."""
    seen = torch.isfinite(bias)
    log_q = scores.masked_fill(~seen, -torch.inf).log_softmax(-1)
    target = target.to(log_q.dtype)
    terms = torch.where(target > 0, target * (target.clamp_min(1e-30).log() - log_q), 0.0)
    return terms.masked_fill(~seen, 0.0).sum(-1).mean()


def weighted_loss(
    head: Tensor, hidden: Tensor, targets: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """hidden [B, T, D] -> (weighted mean cross entropy, accuracy where the weight is 1)."""
    logits = F.linear(hidden, head.to(hidden.dtype)).float().flatten(0, 1)
    flat, w = targets.flatten(), weights.flatten()
    loss = F.cross_entropy(logits, flat, reduction="none")
    own = (w == 1).float()
    with torch.no_grad():
        right = ((logits.argmax(-1) == flat).float() * own).sum() / own.sum().clamp_min(1)
    return (loss * w).sum() / w.sum().clamp_min(1), right


def accepted_length(twin: Twin, batch: Batch, out: Pass, rows: int) -> Tensor:
    """Mean tokens a step with these drafts, where the model writes: 1 + drafts right in a row.

    Teacher-forced: a draft counts when the target, given the true text, would choose it.
    """
    chosen = twin.logits(out.hidden[:rows]).argmax(-1)
    right = torch.ones_like(chosen, dtype=torch.bool)
    total = torch.ones(chosen.shape, device=chosen.device)
    own = ahead(batch, 1, rows)[1] == 1
    for k, hidden in enumerate(out.drafts, 1):
        right = right & (twin.logits(hidden).argmax(-1) == chosen.roll(-k, 1))
        total = total + right
    return total[own].mean()


def ahead(batch: Batch, steps: int, rows: int) -> tuple[Tensor, Tensor]:
    """Targets and weights of the token `steps` after each place, 0 across conversations."""
    ids = batch.ids[:rows].roll(-steps, 1)
    same = batch.documents[:rows] == batch.documents[:rows].roll(-steps, 1)
    same[:, -steps:] = False
    return ids, batch.weights[:rows].roll(-steps, 1) * same
