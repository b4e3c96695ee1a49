# SPDX-License-Identifier: Apache-2.0
"""Draws tokens from logits that are sharded over the vocabulary (DESIGN §3.2).

Ranks exchange their best (value, id) pair a row, and for top-k and top-p four small histograms;
rows of logits are never gathered. Every rank ends with the same tokens. Order as in vLLM:
temperature, min-p, then top-k, then top-p over what top-k left; ties at the k-th value are kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from glmserve.kernels import sampling as ops
from glmserve.parallel.group import Group


@dataclass(frozen=True)
class SamplingRows:
    """Settings of the rows to draw for, gathered from the row state."""

    temperature: Tensor  # [R] fp32, 0 = greedy
    top_p: Tensor  # [R] fp64
    top_k: Tensor  # [R] int64, 0 = off
    min_p: Tensor  # [R] fp32, 0 = off
    seeds: Tensor  # [R] int64
    positions: Tensor  # [R] int64, position in the sequence of the token to draw


class Sampler:
    """Sampling over the vocabulary shard [rank * V/N, (rank + 1) * V/N)."""

    def __init__(
        self, group: Group, shard_width: int, valid_tokens: int, device: torch.device
    ) -> None:
        first = group.rank * shard_width
        self.group = group
        self.valid_tokens = valid_tokens
        self.ids = torch.arange(first, first + shard_width, device=device)
        self.invalid = self.ids >= valid_tokens  # head rows that no token has

    def greedy(self, logits: Tensor) -> Tensor:
        """argmax over the whole vocabulary, ties to the lower id: [R, V/N] -> [R] int64."""
        return self._global_argmax(logits.masked_fill(self.invalid, -torch.inf))

    def sample(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        """One token a row: [R, V/N] logits -> [R] int64, the same on every rank."""
        logits = logits.masked_fill(self.invalid, -torch.inf)
        random = rows.temperature > 0
        if not bool(random.any()):
            return self._global_argmax(logits)
        scaled = logits.to(torch.float32) / torch.where(random, rows.temperature, 1.0)[:, None]
        noisy = scaled + ops.gumbel_noise(rows.seeds, rows.positions, self.ids)
        kept = self._kept(scaled, rows)
        if kept is not None:
            noisy = noisy.masked_fill(~kept, -torch.inf)
        return self._global_argmax(torch.where(random[:, None], noisy.to(logits.dtype), logits))

    def logprobs(
        self, logits: Tensor, tokens: Tensor, alternatives: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-softmax over the whole vocabulary at `tokens` [R], and the most probable ids.

        logits [R, V/N] are the model's own. Returns [R], ids [R, n] and their logprobs [R, n],
        best first, ties to the lower id.
        """
        wide = logits.masked_fill(self.invalid, -torch.inf).to(torch.float64)
        row_max = self.group.all_gather(wide.max(dim=1).values).max(dim=0).values
        mass = self.group.all_reduce(torch.exp(wide - row_max[:, None]).sum(dim=1))
        normaliser = row_max + torch.log(mass)
        column = tokens - self.ids[0]
        inside = (column >= 0) & (column < len(self.ids))
        own = wide.gather(1, torch.where(inside, column, 0)[:, None])[:, 0]
        chosen = self.group.all_reduce(torch.where(inside, own, 0.0)) - normaliser
        if alternatives == 0:
            empty = chosen.new_empty(len(chosen), 0)
            return chosen, empty.to(torch.int64), empty
        values, order = wide.sort(dim=1, descending=True, stable=True)
        best = min(alternatives, len(self.ids))
        pairs = torch.stack([values[:, :best], self.ids[order[:, :best]].to(torch.float64)], dim=2)
        everyone = torch.cat(list(self.group.all_gather(pairs)), dim=1)  # [R, N * best, 2]
        # Stable over ranks in order: lower ranks hold lower ids.
        values, order = everyone[:, :, 0].sort(dim=1, descending=True, stable=True)
        order = order[:, :alternatives]
        ids = everyone[:, :, 1].gather(1, order).to(torch.int64)
        return chosen, ids, values[:, :alternatives] - normaliser[:, None]

    def _kept(self, scaled: Tensor, rows: SamplingRows) -> Tensor | None:
        """Mask [R, V/N] of the tokens that min-p, top-k and top-p leave; None when all are off."""
        random = rows.temperature > 0
        limit_k = random & (rows.top_k > 0)
        limit_p = random & (rows.top_p < 1.0)
        limit_min = random & (rows.min_p > 0)
        kept: Tensor | None = None
        row_max = torch.empty(0)
        if bool((limit_p | limit_min).any()):
            row_max = self.group.all_gather(scaled.max(dim=1).values).max(dim=0).values
        if bool(limit_min.any()):
            # p >= min_p * p_max is z >= z_max + log(min_p); the rest loses its mass at once.
            floor = torch.where(limit_min, row_max + torch.log(rows.min_p), -torch.inf)
            kept = scaled >= floor[:, None]
            scaled = scaled.masked_fill(~kept, -torch.inf)
        keys = ops.ordered_keys(scaled)
        if bool(limit_k.any()):
            ones = torch.ones_like(keys)
            cut = self._threshold(keys, ones, torch.where(limit_k, rows.top_k, 1))
            top = (keys >= cut[:, None]) | ~limit_k[:, None]
            kept = top if kept is None else kept & top
        if bool(limit_p.any()):
            mass = ops.fixed_point_mass(scaled, row_max)
            if kept is not None:
                mass = mass * kept
            total = self.group.all_reduce(mass.sum(dim=1))
            # The smallest top set whose mass is at least top_p of the total.
            target = torch.ceil(rows.top_p * total.to(torch.float64)).to(torch.int64)
            cut = self._threshold(keys, mass, torch.minimum(target, total).clamp(min=1))
            below_p = (keys >= cut[:, None]) | ~limit_p[:, None]
            kept = below_p if kept is None else kept & below_p
        return kept

    def _threshold(self, keys: Tensor, weights: Tensor, target: Tensor) -> Tensor:
        """Largest key whose weight from the top, over all shards, reaches `target` [R]."""
        prefix, above = torch.zeros_like(target), torch.zeros_like(target)
        for shift in (24, 16, 8, 0):
            histogram = self.group.all_reduce(ops.key_histogram(keys, weights, prefix, shift))
            prefix, above = ops.refine_threshold(histogram, prefix, above, target)
        return prefix

    def _global_argmax(self, values: Tensor) -> Tensor:
        best, index = ops.first_argmax(values)
        # Ids are below 2^53, so a pair travels exactly as two doubles.
        pairs = torch.stack([best.to(torch.float64), self.ids[index].to(torch.float64)], dim=1)
        everyone = self.group.all_gather(pairs)  # [N, R, 2]
        shard = ops.first_argmax(everyone[:, :, 0].T)[1]  # lower ranks hold lower ids
        return everyone[shard, torch.arange(len(shard), device=shard.device), 1].to(torch.int64)
