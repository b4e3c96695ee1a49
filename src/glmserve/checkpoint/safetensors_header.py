# SPDX-License-Identifier: Apache-2.0
"""What tensors a checkpoint directory holds, read from the safetensors headers alone.

Not its job: tensor data, or whether these are the right tensors (`reader`).
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path

from glmserve.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_MAX_HEADER = 100 << 20  # bytes; the format's own limit


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor is and what its header says."""

    file: Path
    dtype: str  # safetensors' name: BF16, F32, F8_E4M3, ...
    shape: tuple[int, ...]


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """All tensors of a single-file or an indexed checkpoint. Raises CheckpointError."""
    index = directory / INDEX_NAME
    if not index.is_file():
        if not (directory / SINGLE_NAME).is_file():
            raise CheckpointError(f"{directory}: neither {INDEX_NAME} nor {SINGLE_NAME} is there")
        return _header(directory / SINGLE_NAME)
    try:
        weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{INDEX_NAME} cannot be read: {error!r}") from error
    found: dict[str, StoredTensor] = {}
    for file in sorted(set(weight_map.values())):
        found.update(_header(directory / file))
    for name, file in weight_map.items():
        if name not in found or found[name].file.name != file:
            raise CheckpointError(f"{INDEX_NAME}: {name} is not in {file}")
    return found


def _header(file: Path) -> dict[str, StoredTensor]:
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(size - 8, _MAX_HEADER):
                raise ValueError(f"header of {length} bytes in a file of {size}")
            entries = json.loads(stream.read(length))
        entries.pop("__metadata__", None)
        end = max((e["data_offsets"][1] for e in entries.values()), default=0)
        if 8 + length + end != size:
            raise ValueError(f"{size} bytes where the header promises {8 + length + end}")
        return {
            name: StoredTensor(file, entry["dtype"], tuple(entry["shape"]))
            for name, entry in entries.items()
        }
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise CheckpointError(f"{file.name} cannot be read: {error}") from error
