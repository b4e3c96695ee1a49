# SPDX-License-Identifier: Apache-2.0
"""What tensors a checkpoint directory holds and where, read from the safetensors headers alone.

Not its job: tensor data, or whether these are the right tensors (`formats`).
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glmserve.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_MAX_HEADER = 100 << 20  # bytes; the format's own limit

ITEM_BYTES: Mapping[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2,
    "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor is and what its header says."""

    file: Path
    dtype: str  # safetensors' name: BF16, F32, F8_E4M3, ...
    shape: tuple[int, ...]
    offset: int = 0  # of its first byte in the file

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Headers:
    """All tensors of a checkpoint by name, and the SHA-256 of each file's header."""

    tensors: dict[str, StoredTensor]
    digests: dict[Path, str]

    @property
    def digest(self) -> str:
        """One checksum of all headers: the same names, shapes and places give the same one."""
        lines = [f"{file.name} {digest}\n" for file, digest in sorted(self.digests.items())]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def check_unchanged(self) -> None:
        """Reads all headers again; CheckpointError names a file that is not what it was."""
        for file, digest in self.digests.items():
            if _header(file)[1] != digest:
                raise CheckpointError(f"{file.name} changed while it was being read")


def read_headers(directory: Path) -> Headers:
    """The headers of a single-file or an indexed checkpoint. Raises CheckpointError."""
    index = directory / INDEX_NAME
    if not index.is_file():
        single = directory / SINGLE_NAME
        if not single.is_file():
            raise CheckpointError(f"{directory}: neither {INDEX_NAME} nor {SINGLE_NAME} is there")
        tensors, digest = _header(single)
        return Headers(tensors, {single: digest})
    try:
        weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{INDEX_NAME} cannot be read: {error!r}") from error
    found: dict[str, StoredTensor] = {}
    digests: dict[Path, str] = {}
    for name in sorted(set(weight_map.values())):
        tensors, digests[directory / name] = _header(directory / name)
        found.update(tensors)
    for name, file in weight_map.items():
        if name not in found or found[name].file.name != file:
            raise CheckpointError(f"{INDEX_NAME}: {name} is not in {file}")
    return Headers(found, digests)


def _header(file: Path) -> tuple[dict[str, StoredTensor], str]:
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(size - 8, _MAX_HEADER):
                raise ValueError(f"header of {length} bytes in a file of {size}")
            raw = stream.read(length)
        entries = json.loads(raw)
        entries.pop("__metadata__", None)
        end = max((e["data_offsets"][1] for e in entries.values()), default=0)
        if 8 + length + end != size:
            raise ValueError(f"{size} bytes where the header promises {8 + length + end}")
        tensors = {name: _entry(file, name, entry, 8 + length) for name, entry in entries.items()}
        return tensors, hashlib.sha256(raw).hexdigest()
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise CheckpointError(f"{file.name} cannot be read: {error}") from error


def _entry(file: Path, name: str, entry: dict[str, Any], base: int) -> StoredTensor:
    begin, end = entry["data_offsets"]
    tensor = StoredTensor(file, entry["dtype"], tuple(entry["shape"]), base + begin)
    if tensor.dtype not in ITEM_BYTES:
        raise ValueError(f"{name} has the unknown dtype {tensor.dtype}")
    if tensor.nbytes != end - begin:
        raise ValueError(f"{name} has {end - begin} bytes where its shape needs {tensor.nbytes}")
    return tensor
