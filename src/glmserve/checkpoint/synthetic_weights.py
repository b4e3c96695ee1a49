# SPDX-License-Identifier: Apache-2.0
"""Random weights made where they are used, in the form that the checkpoint's files would give.

A tensor's numbers come from (seed, name, block of rows), so ranks agree on what they share and any
cut of a tensor is a cut of the same numbers. CPU and CUDA draw different ones. What is kept in fp8
or int4 is rounded to it; the rest is as drawn. Not its job: files (`synthetic`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from glmserve.checkpoint.declared import open_source
from glmserve.checkpoint.formats import BLOCK
from glmserve.checkpoint.layout import TensorSpec, checkpoint_tensors
from glmserve.checkpoint.placement import Held, held_weights
from glmserve.checkpoint.progress import ProgressBar
from glmserve.checkpoint.quantiser import block_fp8, packed_int
from glmserve.checkpoint.reader import keeps_quantised
from glmserve.checkpoint.share import Share
from glmserve.checkpoint.synthetic import scaled
from glmserve.checkpoint.weights import ModelWeights, View, allocate
from glmserve.kernels.experts import Int4Weight
from glmserve.kernels.linear import QuantWeight
from glmserve.model_config import ExpertLayout

_ELEMENTS = 16 << 20  # drawn at once
# Small against the spread of the scores, as training leaves it: experts are hit about evenly.
_BIAS_SPREAD = 0.01


@dataclass(frozen=True)
class SyntheticShare(Share):
    """A share of weights that no file holds."""

    seed: int = 0

    @property
    def origin(self) -> str:
        return f"synthetic, seed {self.seed}"

    @torch.inference_mode()
    def load(self, on_progress: Callable[[str], None] | None = None) -> ModelWeights:
        weights, views = allocate(self.config, self.held, self.dtype, self.device)
        specs = checkpoint_tensors(self.config)
        generator = torch.Generator(self.device)
        bar = None
        if on_progress is not None:
            bar = ProgressBar(f"rank {self.rank}, synthetic", self.memory_bytes, on_progress)
        for name, held in self.held.items():
            for first, numbers in _numbers(name, specs[name], held, generator, self.seed):
                _put(views[name], first, numbers, held.stored.group)
            if bar is not None:
                bar.add(held.memory_bytes(self.dtype.itemsize))
        return weights


def synthetic_share(
    name: str,
    rank: int,
    size: int,
    layout: ExpertLayout,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    mtp: bool = True,
    keep: bool | None = None,
    seed: int = 0,
) -> SyntheticShare:
    """What `rank` of `size` makes of a config: a directory, a config.json or a built-in name. Only
    the config is read; keep as in `reader.open_share`."""
    source = open_source(name, files=False)
    source.config.check_ranks(size, layout)
    if keep is None:
        keep = keeps_quantised(dtype, device)
    held = held_weights(source.config, source.weights, rank, size, layout, keep, mtp)
    return SyntheticShare(source.config, rank, held, dtype, device, seed)


def _numbers(
    name: str, spec: TensorSpec, held: Held, generator: torch.Generator, seed: int
) -> Iterator[tuple[int, Tensor]]:
    """(first row in the rank's part, fp32 numbers) for blocks of rows, in order."""
    rows = held.part[0]
    columns = held.part[1:]
    width = spec.shape[1] if columns else 1
    height = max(BLOCK, _ELEMENTS // width // BLOCK * BLOCK)
    for block in range(rows.start // height, -(-rows.stop // height)):
        begin = block * height
        count = min(height, spec.shape[0] - begin)
        digest = hashlib.sha256(f"{seed} {name} {block}".encode()).digest()
        generator.manual_seed(int.from_bytes(digest[:7], "little"))
        shape = (count, *spec.shape[1:])
        drawn = torch.randn(shape, generator=generator, device=generator.device)
        if name.endswith("e_score_correction_bias"):
            numbers = 34.0 + _BIAS_SPREAD * drawn
        else:
            numbers = scaled(name, drawn, width)
        low, high = max(rows.start - begin, 0), min(rows.stop - begin, count)
        yield begin + low - rows.start, numbers[(slice(low, high), *columns)]


def _put(view: View, first: int, numbers: Tensor, group: int) -> None:
    rows = slice(first, first + len(numbers))
    if isinstance(view, Tensor):
        view[rows].copy_(numbers)
    elif isinstance(view, QuantWeight):
        made = block_fp8(numbers)
        view.values[rows].copy_(made[".weight"])
        scales = made[".weight_scale_inv"]
        view.scales[first // BLOCK : first // BLOCK + len(scales)].copy_(scales)
    else:
        assert isinstance(view, Int4Weight)
        made = packed_int(numbers, 4, group, symmetric=view.zeros is None)
        view.packed[rows].copy_(made[".weight_packed"])
        view.scales[rows].copy_(made[".weight_scale"])
        if view.zeros is not None:
            zeros = made[".weight_zero_point"]
            view.zeros[first // 8 : first // 8 + len(zeros)].copy_(zeros)
