# SPDX-License-Identifier: Apache-2.0
"""Reading a rank's share of a checkpoint: headers are checked first, then only its slices are read.

Every stored tensor is accounted for against `layout`: what is missing, extra or of another shape or
dtype is named in one error, before any memory is allocated. Not its job: quantised weights, which
are refused by name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from glmserve.checkpoint.layout import (
    TensorSpec,
    checkpoint_tensors,
    ignored_tensors,
    local_slice,
)
from glmserve.checkpoint.safetensors_header import StoredTensor, stored_tensors
from glmserve.checkpoint.weights import ModelWeights, allocate
from glmserve.errors import CheckpointError
from glmserve.model_config import ExpertLayout, ModelConfig

_PLAIN = ("BF16", "F16", "F32", "F64")
_WIDE = ("F32", "F64")
_CORRECTION_BIAS = ".e_score_correction_bias"
_QUANTISED_SUFFIXES = (
    "_scale_inv",
    "_scale",
    "_scale_2",
    "_packed",
    "_zero_point",
    ".qweight",
    ".qzeros",
    ".scales",
)
_NAMED = 8  # offenders of each kind that a message lists


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
) -> ModelWeights:
    """Reads what `rank` of `size` holds, converted to `dtype` (router tensors: fp32 or wider).

    The bytes held are `weights.parameter_bytes`; `on_progress` gets one line a file. `mtp=False`
    leaves the MTP layer on disk. Raises CheckpointError naming every tensor that does not fit,
    ConfigError when sizes do not divide.
    """
    config.check_ranks(size, layout)
    stored = stored_tensors(Path(directory))
    specs = checkpoint_tensors(config)
    _account(stored, specs, ignored_tensors(config))
    weights, views = allocate(config, rank, size, layout, dtype, device, mtp)

    by_file: dict[Path, list[str]] = defaultdict(list)
    for name in views:
        by_file[stored[name].file].append(name)
    total, done = sum(v.numel() * v.element_size() for v in views.values()), 0
    for file in sorted(by_file):
        with safe_open(file, framework="pt", device="cpu") as source:
            for name in sorted(by_file[file]):
                part = local_slice(specs[name], config, rank, size, layout)
                assert part is not None
                views[name].copy_(source.get_slice(name)[part])
                done += views[name].numel() * views[name].element_size()
        if on_progress is not None:
            on_progress(f"rank {rank}: {done / 1e9:.2f} of {total / 1e9:.2f} GB of weights read")
    return weights


def _account(
    stored: dict[str, StoredTensor], specs: Mapping[str, TensorSpec], ignored: frozenset[str]
) -> None:
    """Raises one CheckpointError that names all tensors that are not as `specs` wants them."""
    quantised = [
        name
        for name, tensor in stored.items()
        if (tensor.dtype not in _PLAIN if name in specs else name.endswith(_QUANTISED_SUFFIXES))
    ]
    if quantised:
        raise CheckpointError(
            "quantised weights are not served, only bf16, fp16, fp32 and fp64: "
            + _list([f"{n} ({stored[n].dtype})" for n in sorted(quantised)])
        )
    problems = {
        "missing": [name for name in specs if name not in stored],
        "extra": [name for name in stored if name not in specs and name not in ignored],
        "wrong shape": [
            f"{name} is {list(stored[name].shape)}, not {list(spec.shape)}"
            for name, spec in specs.items()
            if name in stored and stored[name].shape != spec.shape
        ],
        "wrong dtype": [
            f"{name} is {stored[name].dtype}: a correction bias below fp32 changes the routing"
            for name in specs
            if name.endswith(_CORRECTION_BIAS)
            and name in stored
            and stored[name].dtype not in _WIDE
        ],
    }
    lines = [f"{kind}: {_list(names)}" for kind, names in problems.items() if names]
    if lines:
        raise CheckpointError("the checkpoint does not fit its config.json; " + "; ".join(lines))


def _list(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
