# SPDX-License-Identifier: Apache-2.0
"""Small checkpoints in every format, and the plain weights that they stand for.

The de-quantisation here is written from the formats' definitions, number by number in numpy, and
shares nothing with the code under test.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from glmserve.checkpoint.quantiser import quantise

Array = npt.NDArray[Any]
# Nibble k of an AutoAWQ word belongs to this one of its eight outputs.
_AWQ = (0, 2, 4, 6, 1, 3, 5, 7)


def read_all(directory: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in directory.glob("*.safetensors"):
        found |= load_file(file)
    return found


def write(directory: Path, tensors: dict[str, Tensor], like: Path) -> Path:
    """A single-file checkpoint with the config of another."""
    directory.mkdir(parents=True, exist_ok=True)
    shutil.copy(like / "config.json", directory)
    save_file({k: v.contiguous() for k, v in tensors.items()}, directory / "model.safetensors")
    return directory


def shortened(source: Path, directory: Path) -> Path:
    """The checkpoint without layers 4 to 7: three dense layers, a routed one, the MTP layer."""
    tensors = {
        name.replace("layers.8.", "layers.4."): value
        for name, value in read_all(source).items()
        if not name.startswith(tuple(f"model.layers.{n}." for n in (4, 5, 6, 7)))
    }
    write(directory, tensors, source)
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**raw, "num_hidden_layers": 4}))
    return directory


def quantised_copy(source: Path, directory: Path, format: str) -> Path:
    return write(directory, quantise(read_all(source), format), source)


def plain_copy(source: Path, directory: Path) -> Path:
    """The checkpoint with every weight as fp32 numbers."""
    return write(directory, dequantise_all(read_all(source)), source)


def dequantise_all(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for name, value in tensors.items():
        base = name.removesuffix(".weight")
        if name + "_scale_inv" in tensors:
            out[name] = torch.from_numpy(_fp8(value, tensors[name + "_scale_inv"]))
        elif name.endswith(".weight_packed"):
            stem = name.removesuffix("_packed")
            out[stem] = torch.from_numpy(_packed(stem, tensors))
        elif name.endswith(".qweight"):
            stem = name.removesuffix(".qweight")
            out[stem + ".weight"] = torch.from_numpy(_awq(stem, tensors))
        elif value.dtype == torch.int8:
            scales = np.repeat(wide(tensors[base + ".weight_scale"]), value.shape[1], 1)
            out[name] = torch.from_numpy(value.numpy().astype(np.float32) * scales)
        elif not name.endswith(
            ("_scale_inv", "_scale", "_zero_point", "_shape", ".qzeros", ".scales")
        ):
            out[name] = value
    return out


def wide(x: Tensor) -> Array:
    return x.float().numpy()


def _fp8(values: Tensor, scales: Tensor) -> Array:
    rows, columns = values.shape
    spread = np.repeat(np.repeat(scales.numpy(), 128, 0)[:rows], 128, 1)[:, :columns]
    return np.asarray(wide(values) * spread, dtype=np.float32)


def _fields(words: Array, bits: int) -> Array:
    """[r, c] int32 -> [r, c, 32 / bits] unsigned."""
    unsigned = words.astype(np.int64) & 0xFFFFFFFF
    return np.stack([(unsigned >> shift) % (1 << bits) for shift in range(0, 32, bits)], -1)


def _packed(stem: str, tensors: dict[str, Tensor]) -> Array:
    rows, columns = tensors[stem + "_shape"].tolist()
    words, scales = tensors[stem + "_packed"].numpy(), wide(tensors[stem + "_scale"])
    bits = words.shape[1] * 32 // columns
    half, group = 1 << (bits - 1), columns // scales.shape[1]
    q = _fields(words, bits).reshape(rows, columns) - half
    z = np.zeros((rows, scales.shape[1]), dtype=np.int64)
    if stem + "_zero_point" in tensors:
        packed = _fields(tensors[stem + "_zero_point"].numpy(), bits)  # [rows / each, groups, each]
        z = packed.transpose(0, 2, 1).reshape(rows, -1) - half
    w = (q - np.repeat(z, group, 1)).astype(np.float32) * np.repeat(scales, group, 1)
    return np.asarray(w, dtype=np.float32)


def _awq(stem: str, tensors: dict[str, Tensor]) -> Array:
    q, z = (
        _outputs(_fields(tensors[f"{stem}.{part}"].numpy(), 4)) for part in ("qweight", "qzeros")
    )
    scales = wide(tensors[stem + ".scales"])
    group = q.shape[0] // scales.shape[0]
    w = (q - np.repeat(z, group, 0)).astype(np.float32) * np.repeat(scales, group, 0)
    return np.ascontiguousarray(w.T)


def _outputs(fields: Array) -> Array:
    out = np.empty_like(fields)
    for k, output in enumerate(_AWQ):
        out[..., output] = fields[..., k]
    return out.reshape(len(fields), -1)
