# SPDX-License-Identifier: Apache-2.0
"""Draws tokens from logits that are sharded over the vocabulary (DESIGN §3.2).

Ranks exchange their best (value, id) pair a row, and for top-k and top-p a few histograms; rows
of logits are never gathered. Every rank ends with the same tokens. Order as in vLLM: temperature,
min-p, then top-k, then top-p over what top-k left; ties at a limit are kept. Distances from the
row's largest logit count in steps of 2^-17: what lies in the step of a limit is tied with it.

On CUDA the steps are kernels with fixed shapes that a graph can capture, on the CPU plain torch;
both draw the same ids from the same fp32 logits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from glmserve.kernels.dispatch import use_kernel
from glmserve.kernels.sampling import SamplingRows, reference
from glmserve.messages import RowInit
from glmserve.parallel.group import Group

__all__ = ["Sampler", "SamplingRows"]


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
        self._kernels = _Kernels(group, first, shard_width, valid_tokens)
        self._limited: set[int] = set()

    def admit(self, init: RowInit) -> None:
        """Notes whether the row's new sequence asks for top-k, top-p or min-p."""
        self._limited.discard(init.row)
        if init.temperature > 0 and (init.top_k > 0 or init.top_p < 1 or init.min_p > 0):
            self._limited.add(init.row)

    def limited(self, rows: Iterable[int]) -> bool:
        """Whether any of the device rows needs `sample` with limits."""
        return not self._limited.isdisjoint(rows)

    def prepare(self, rows: int) -> None:
        """Makes room for steps of up to `rows` rows; call it before a graph is captured."""
        self._kernels.scratch_for(rows, self.ids.device)

    def greedy(self, logits: Tensor) -> Tensor:
        """argmax over the whole vocabulary, ties to the lower id: [R, V/N] -> [R] int64."""
        if self._kernels.serve(logits):
            return self._kernels.greedy(logits)
        return self._global_argmax(logits.masked_fill(self.invalid, -torch.inf))

    def sample(self, logits: Tensor, rows: SamplingRows, limits: bool = True) -> Tensor:
        """One token a row: [R, V/N] logits -> [R] int64, the same on every rank.

        limits: whether a row may ask for top-k, top-p or min-p.
        """
        if self._kernels.serve(logits):
            return self._kernels.sample(logits, rows, limits)
        logits = logits.masked_fill(self.invalid, -torch.inf)
        temperature = rows.temperature[rows.rows].to(torch.float32)
        random = temperature > 0
        if not bool(random.any()):
            return self._global_argmax(logits)
        scaled = reference.scaled_logits(logits, temperature)
        first, width = int(self.ids[0]), len(self.ids)
        noise = reference.gumbel_noise(rows.seeds[rows.rows], rows.positions, first, width)
        noisy = scaled + noise
        if limits:
            dropped = self._dropped(scaled, rows, random)
            if dropped is not None:
                noisy = noisy.masked_fill(dropped, -torch.inf)
        return self._global_argmax(torch.where(random[:, None], noisy.to(logits.dtype), logits))

    def logprobs(
        self, logits: Tensor, tokens: Tensor, alternatives: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-softmax over the whole vocabulary at `tokens` [R], and the most probable ids.

        logits [R, V/N] are the model's own. Returns [R], ids [R, n] and their logprobs [R, n],
        best first, ties to the lower id. Plain torch everywhere: it runs only where a request
        asks, outside captured graphs.
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

    def _dropped(self, scaled: Tensor, rows: SamplingRows, random: Tensor) -> Tensor | None:
        """Mask [R, V/N] of the tokens that min-p, top-k and top-p drop; None when all are off."""
        top_k, top_p, min_p = (x[rows.rows] for x in (rows.top_k, rows.top_p, rows.min_p))
        limit_k, limit_p = random & (top_k > 0), random & (top_p < 1.0)
        limit_min = random & (min_p > 0)
        limited = limit_k | limit_p | limit_min
        if not bool(limited.any()):
            return None
        row_max = self.group.all_gather(scaled.max(dim=1).values).max(dim=0).values
        distance = reference.distances(scaled, row_max)
        last = reference.STEPS - 1
        cut = torch.where(limit_min, reference.min_p_steps(min_p), last)
        if bool(limit_k.any()):
            counted = (distance <= cut[:, None]).to(torch.int64)
            k_cut = self._threshold(distance, counted, torch.where(limit_k, top_k, 1))
            cut = torch.where(limit_k, torch.minimum(cut, k_cut), cut)
        if bool(limit_p.any()):
            mass = reference.masses(distance) * (distance <= cut[:, None])
            total = self.group.all_reduce(mass.sum(dim=1))
            # The smallest top set whose mass is at least top_p of the total.
            target = torch.ceil(top_p * total.to(torch.float64)).to(torch.int64)
            p_cut = self._threshold(distance, mass, torch.minimum(target, total).clamp(min=1))
            cut = torch.where(limit_p, torch.minimum(cut, p_cut), cut)
        return (distance > cut[:, None]) & limited[:, None]

    def _threshold(self, distance: Tensor, weights: Tensor, target: Tensor) -> Tensor:
        """Least distance up to which the weights of all shards reach `target` [R]."""
        cut, before = torch.zeros_like(target), torch.zeros_like(target)
        for shift, bits in reference.DIGITS:
            sums = reference.histogram(distance, weights, cut, shift, bits)
            digit, before = reference.reach(self.group.all_reduce(sums), before, target)
            cut = (cut << bits) + digit
        return cut

    def _global_argmax(self, values: Tensor) -> Tensor:
        best, index = reference.first_argmax(values)
        # Ids are below 2^53, so a pair travels exactly as two doubles.
        pairs = torch.stack([best.to(torch.float64), self.ids[index].to(torch.float64)], dim=1)
        everyone = self.group.all_gather(pairs)  # [N, R, 2]
        shard = reference.first_argmax(everyone[:, :, 0].T)[1]  # lower ranks hold lower ids
        return everyone[shard, torch.arange(len(shard), device=shard.device), 1].to(torch.int64)


class _Kernels:
    """The same by kernels; Triton is imported when a GPU asks for them."""

    def __init__(self, group: Group, first: int, width: int, valid: int) -> None:
        self.group, self._place = group, (first, width, valid)
        # Larger ones join smaller ones: a captured graph goes on with the one that it knows.
        self._scratch: list[Any] = []

    def serve(self, logits: Tensor) -> bool:
        """Whether kernels run; UnservedShape where they should and cannot."""
        if not logits.is_cuda:
            return False
        from glmserve.kernels.sampling import launch

        vocabulary = self._place[1] * self.group.size
        return use_kernel("sampling", "cuda", launch.unserved(logits.dtype, vocabulary))

    def scratch_for(self, rows: int, device: torch.device) -> Any:
        from glmserve.kernels.sampling import launch

        if not self._scratch or self._scratch[-1].rows < rows:
            self._scratch.append(launch.Scratch.make(max(rows, 64), device))
        return self._scratch[-1]

    def greedy(self, logits: Tensor) -> Tensor:
        from glmserve.kernels.sampling import launch

        scratch = self.scratch_for(len(logits), logits.device)
        alone = self.group.size == 1
        out = launch.greedy(logits.contiguous(), launch.Shard(*self._place), scratch, alone)
        return out if alone else launch.join(self.group.all_gather(out))

    def sample(self, logits: Tensor, rows: SamplingRows, limits: bool) -> Tensor:
        from glmserve.kernels.sampling import launch

        logits = logits.contiguous()
        shard = launch.Shard(*self._place)
        scratch = self.scratch_for(len(logits), logits.device)
        cuts = None
        if limits and len(logits):
            cuts = launch.find_cuts(logits, rows, shard, scratch, self.group.all_gather)
        alone = self.group.size == 1
        out = launch.draw(logits, rows, shard, cuts, scratch, alone)
        return out if alone else launch.join(self.group.all_gather(out))
