# SPDX-License-Identifier: Apache-2.0
"""Configs by path or name, and how their weights are stored: what the files say (`formats`), or,
for plans, ledgers and synthetic weights of a config without files, what they would.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glmserve.checkpoint.formats import BLOCK, Scheme, StoredWeight, stored_weights
from glmserve.checkpoint.layout import TensorSpec, checkpoint_tensors, ignored_tensors
from glmserve.checkpoint.safetensors_header import (
    INDEX_NAME,
    SINGLE_NAME,
    Headers,
    StoredTensor,
    read_headers,
)
from glmserve.errors import ConfigError
from glmserve.model_config import ModelConfig

CONFIGS = Path(__file__).parent / "configs"
# Released block-fp8 checkpoints keep these two-dimensional weights in bf16.
_BF16 = ("embed_tokens", "lm_head", "mlp.gate.", "weights_proj", "eh_proj")
_NOWHERE = Path()


@dataclass(frozen=True)
class Source:
    """A model's config, how its weights are stored, and the headers if there are files."""

    config: ModelConfig
    weights: Mapping[str, StoredWeight]
    headers: Headers | None


def open_source(name: str, files: bool = True) -> Source:
    """A checkpoint directory, a config.json, or the name of a built-in config (glm-5.2-fp8).

    files=False does not look at the weights' files. Raises ConfigError and CheckpointError.
    """
    path = config_path(name)
    config = ModelConfig.from_file(path)
    if files and any((path.parent / file).is_file() for file in (INDEX_NAME, SINGLE_NAME)):
        weights, headers = read_stored(path.parent, config)
        return Source(config, weights, headers)
    raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return Source(config, declared_weights(config, raw.get("quantization_config")), None)


def read_stored(directory: Path, config: ModelConfig) -> tuple[dict[str, StoredWeight], Headers]:
    """How the directory's files store each weight. CheckpointError names whatever does not fit."""
    headers = read_headers(directory)
    specs = checkpoint_tensors(config)
    return stored_weights(headers.tensors, specs, ignored_tensors(config)), headers


def config_path(name: str) -> Path:
    """Where the config.json of a checkpoint, a file or a built-in name lies."""
    given = Path(name)
    if given.is_dir():
        return given / "config.json"
    if not given.is_file() and (CONFIGS / f"{name}.json").is_file():
        return CONFIGS / f"{name}.json"
    return given


def declared_weights(
    config: ModelConfig, quantization: Mapping[str, Any] | None
) -> dict[str, StoredWeight]:
    """What a config's `quantization_config` says: none (bf16), fp8 in 128 x 128 blocks, or integers
    for the target layers' routed experts (compressed-tensors, awq)."""
    method = (quantization or {}).get("quant_method")
    if method not in (None, "fp8", "compressed-tensors", "awq"):
        raise ConfigError("quantization_config.quant_method", method, "is not served")
    form = _integers(quantization or {}) if method in ("compressed-tensors", "awq") else None
    mtp = f"model.layers.{config.num_hidden_layers}."
    found = {}
    for name, spec in checkpoint_tensors(config).items():
        if method == "fp8" and len(spec.shape) == 2 and not any(part in name for part in _BF16):
            found[name] = _block_fp8(spec)
        elif form is not None and spec.expert is not None and not name.startswith(mtp):
            found[name] = _integer(spec, *form)
        else:
            dtype = "F32" if name.endswith("correction_bias") else "BF16"
            values = StoredTensor(_NOWHERE, dtype, spec.shape)
            found[name] = StoredWeight(Scheme.PLAIN, spec.shape, {"values": values})
    return found


def _block_fp8(spec: TensorSpec) -> StoredWeight:
    blocks = tuple(-(-size // BLOCK) for size in spec.shape)
    parts = {
        "values": StoredTensor(_NOWHERE, "F8_E4M3", spec.shape),
        "scales": StoredTensor(_NOWHERE, "F32", blocks),
    }
    return StoredWeight(Scheme.BLOCK_FP8, spec.shape, parts)


def _integers(quantization: Mapping[str, Any]) -> tuple[Scheme, int, int, bool]:
    """(scheme, bits, columns of a group, symmetric) of a `quantization_config`."""
    if quantization["quant_method"] == "awq":
        bits, group = quantization.get("bits", 4), quantization.get("group_size", 128)
        if bits != 4 or not isinstance(group, int) or group < 1:
            raise ConfigError("quantization_config", dict(quantization), "only 4 bits with groups")
        return Scheme.AWQ, 4, group, False
    groups = quantization.get("config_groups")
    first: Any = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    found = first.get("weights") if isinstance(first, dict) else None
    weights: dict[str, Any] = found if isinstance(found, dict) else {}
    bits, group = weights.get("num_bits"), weights.get("group_size")
    if bits not in (4, 8) or weights.get("type") != "int" or not isinstance(group, int):
        raise ConfigError(
            "quantization_config.config_groups", groups, "only 4 or 8 bit integers with groups"
        )
    return Scheme.PACKED, bits, group, bool(weights.get("symmetric", True))


def _integer(
    spec: TensorSpec, scheme: Scheme, bits: int, group: int, symmetric: bool
) -> StoredWeight:
    rows, columns = spec.shape
    if columns % group:
        raise ConfigError("group_size", group, f"does not divide {columns} columns")
    shapes = {
        "values": ("I32", (rows, columns * bits // 32)),
        "scales": ("BF16", (rows, columns // group)),
        "zeros": ("I32", (rows * bits // 32, columns // group)),
    }
    if scheme is Scheme.AWQ:
        shapes = {
            "values": ("I32", (columns, rows // 8)),
            "scales": ("F16", (columns // group, rows)),
            "zeros": ("I32", (columns // group, rows // 8)),
        }
    if symmetric:
        del shapes["zeros"]
    parts = {role: StoredTensor(_NOWHERE, *shape) for role, shape in shapes.items()}
    return StoredWeight(scheme, spec.shape, parts, bits, group)
