# SPDX-License-Identifier: Apache-2.0
"""Reading a rank's share of a checkpoint: headers are checked first, then only its slices are read.

Every stored tensor is accounted for (`formats`) before any memory is allocated; each then either
goes to its place as it is stored or is de-quantised on the way. Not its job: the reading itself
(`loader`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from glmserve.checkpoint.declared import read_stored
from glmserve.checkpoint.dequantise import dequantise, repack_awq
from glmserve.checkpoint.formats import Scheme
from glmserve.checkpoint.loader import THREADS, Convert, Job, Loader, Piece, copies, piece
from glmserve.checkpoint.placement import Form, Held, held_weights
from glmserve.checkpoint.progress import ProgressBar
from glmserve.checkpoint.safetensors_header import Headers
from glmserve.checkpoint.share import Share
from glmserve.checkpoint.weights import ModelWeights, View, allocate
from glmserve.kernels.experts import Int4Weight
from glmserve.kernels.linear import QuantWeight
from glmserve.model_config import ExpertLayout, ModelConfig


def keeps_quantised(dtype: torch.dtype, device: torch.device | str) -> bool:
    """Whether weights stay as stored: the kernels read them so, in bf16 on CUDA. Elsewhere the
    references run on de-quantised weights, which stand for the same numbers."""
    return torch.device(device).type == "cuda" and dtype == torch.bfloat16


@dataclass(frozen=True)
class StoredShare(Share):
    """A share of a checkpoint's files."""

    headers: Headers

    @property
    def origin(self) -> str:
        return f"headers {self.headers.digest}"

    def load(
        self, on_progress: Callable[[str], None] | None = None, threads: int = THREADS
    ) -> ModelWeights:
        """Reads it; `on_progress` gets lines with a bar. Raises CheckpointError naming the files
        that cannot be read or that changed meanwhile."""
        weights, views = allocate(self.config, self.held, self.dtype, self.device)
        loader = Loader(jobs(self.held, views), threads)
        bar = None
        if on_progress is not None:
            bar = ProgressBar(f"rank {self.rank}", loader.total, on_progress)
        loader.run(bar)
        self.headers.check_unchanged()
        return weights


def open_share(
    directory: str | Path,
    config: ModelConfig,
    rank: int,
    size: int,
    layout: ExpertLayout,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    mtp: bool = True,
    keep: bool | None = None,
) -> StoredShare:
    """What `rank` of `size` holds. Plain and de-quantised weights get `dtype` (the router's: fp32
    or wider); keep: block-fp8 and int4 stay so where kernels take them, None: on CUDA in bf16.

    `mtp=False` leaves the MTP layer on disk. Raises CheckpointError naming every tensor that does
    not fit, ConfigError when sizes do not divide.
    """
    config.check_ranks(size, layout)
    stored, headers = read_stored(Path(directory), config)
    if keep is None:
        keep = keeps_quantised(dtype, device)
    held = held_weights(config, stored, rank, size, layout, keep, mtp)
    return StoredShare(config, rank, held, dtype, device, headers)


def load_weights(
    directory: str | Path,
    config: ModelConfig,
    rank: int,
    size: int,
    layout: ExpertLayout,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    on_progress: Callable[[str], None] | None = None,
    mtp: bool = True,
    keep: bool | None = None,
) -> ModelWeights:
    """`open_share` and its `load` at once."""
    share = open_share(directory, config, rank, size, layout, dtype, device, mtp, keep)
    return share.load(on_progress)


def jobs(held: Mapping[str, Held], views: Mapping[str, View]) -> list[Job]:
    """What to read for each held weight and where it goes."""
    pieces: list[Piece] = []
    converts: list[Job] = []
    for name, weight in held.items():
        stored, view = weight.stored, views[name]
        slices = stored.slices(weight.part)
        plain = stored.scheme is Scheme.PLAIN
        if stored.scheme is Scheme.AWQ or (weight.form is Form.PLAIN and not plain):
            finish = _finish(weight, view)
            converts.append(Convert(stored, slices, finish, _parts(view)["values"].device))
            continue
        for role, target in _parts(view).items():
            pieces.append(piece(stored.parts[role], slices[role], target))
    return [*copies(pieces), *converts]


def _parts(view: View) -> dict[str, Tensor]:
    """Where each stored part goes when nothing is converted."""
    if isinstance(view, QuantWeight):
        return {"values": view.values, "scales": view.scales}
    if isinstance(view, Int4Weight):
        parts = {"values": view.packed, "scales": view.scales}
        return parts if view.zeros is None else parts | {"zeros": view.zeros}
    return {"values": view}


def _finish(weight: Held, view: View) -> Callable[[dict[str, Tensor]], None]:
    def finish(raw: dict[str, Tensor]) -> None:
        if isinstance(view, Int4Weight):
            made = repack_awq(raw, weight.part[0])
            for target, source in zip(view, made, strict=True):
                assert target is not None
                assert source is not None
                target.copy_(source)
            return
        assert isinstance(view, Tensor)
        dequantise(weight.stored, weight.part, raw, view)

    return finish
