# SPDX-License-Identifier: Apache-2.0
"""How a checkpoint stores each weight: plain, block-fp8, packed int4 or int8, or AutoAWQ's layout.

What decides is the tensors that are there, their dtypes and shapes; a config's lists of modules are
not asked. Every stored tensor is accounted for against `layout`: one error names all that do not
fit. Knows no torch. Not its job: arithmetic (`dequantise`) or bytes of files (`loader`).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from glmserve.checkpoint.layout import TensorSpec
from glmserve.checkpoint.safetensors_header import StoredTensor
from glmserve.errors import CheckpointError

BLOCK = 128  # rows and columns of one scale of a block-fp8 weight
_PLAIN = ("BF16", "F16", "F32", "F64")
_WIDE = ("F32", "F64")
_CORRECTION_BIAS = ".e_score_correction_bias"
_NAMED = 8  # offenders of each kind that a message lists

Part = tuple[slice, ...]


class Scheme(enum.Enum):
    """The parts that each scheme stores are listed in `_parts`."""

    PLAIN = "plain"
    BLOCK_FP8 = "block-fp8"  # e4m3 and an fp32 scale for 128 x 128
    PACKED = "packed int"  # compressed-tensors pack-quantized: words along the columns
    INT8 = "int8"  # compressed-tensors int-quantized: a byte a value
    AWQ = "AutoAWQ int4"  # transposed, nibbles interleaved along the outputs


@dataclass(frozen=True)
class StoredWeight:
    """One tensor of `layout` as the checkpoint has it. Parts by role: values, scales, zeros."""

    scheme: Scheme
    shape: tuple[int, ...]  # of the weight itself, [out, in] or [size]
    parts: Mapping[str, StoredTensor]
    bits: int = 0  # of an integer
    group: int = 0  # columns that share a scale

    def slices(self, part: Part) -> dict[str, Part]:
        """What of each stored part belongs to a slice of the weight. Where the slice cuts a block,
        a group or a word, the whole of it is included."""
        if self.scheme is Scheme.PLAIN:
            return {"values": part}
        rows, columns = part
        if self.scheme is Scheme.BLOCK_FP8:
            return {"values": part, "scales": (_cover(rows, BLOCK), _cover(columns, BLOCK))}
        groups = _cover(columns, self.group)
        if self.scheme is Scheme.AWQ:
            words = _cover(rows, 8)
            return {"values": (columns, words), "scales": (groups, rows), "zeros": (groups, words)}
        if self.scheme is Scheme.INT8:
            return {"values": part, "scales": (rows, groups)}
        each = 32 // self.bits
        found: dict[str, Part] = {"values": (rows, _cover(columns, each)), "scales": (rows, groups)}
        if "zeros" in self.parts:
            found["zeros"] = (_cover(rows, each), groups)
        return found


def _cover(part: slice, unit: int) -> slice:
    return slice(part.start // unit, -(-part.stop // unit))


def stored_weights(
    stored: Mapping[str, StoredTensor], specs: Mapping[str, TensorSpec], ignored: frozenset[str]
) -> dict[str, StoredWeight]:
    """How each tensor of `specs` is stored. Raises one CheckpointError that names everything that
    is missing, extra, of another shape, or in a scheme that is not served."""
    account = _Account(stored)
    found = {name: account.weight(name, spec) for name, spec in specs.items()}
    stems = tuple(name.removesuffix(".weight") + "." for name in ignored)
    account.problems["extra"] = [
        name for name in stored if name not in account.used and not name.startswith(stems or " ")
    ]
    account.check()
    return {name: weight for name, weight in found.items() if weight is not None}


class _Account:
    """Looks tensors up, notes which were used and what is wrong."""

    def __init__(self, stored: Mapping[str, StoredTensor]) -> None:
        self.stored = stored
        self.used: set[str] = set()
        kinds = ("NVFP4", "not served", "missing", "extra", "wrong shape", "wrong dtype")
        self.problems: dict[str, list[str]] = {kind: [] for kind in kinds}

    def take(
        self, name: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...]
    ) -> StoredTensor | None:
        """The named tensor if it is there in one of the dtypes and shapes; else notes why not."""
        tensor = self.stored.get(name)
        self.used.add(name)
        if tensor is None:
            self.problems["missing"].append(name)
        elif tensor.dtype not in dtypes:
            self.problems["not served"].append(f"{name} ({tensor.dtype})")
        elif tensor.shape not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            self.problems["wrong shape"].append(f"{name} is {list(tensor.shape)}, not {wanted}")
        else:
            return tensor
        return None

    def weight(self, name: str, spec: TensorSpec) -> StoredWeight | None:
        base = name.removesuffix(".weight")
        plain = self.stored.get(name)
        if f"{base}.weight_scale_2" in self.stored or f"{base}.weight_global_scale" in self.stored:
            self.problems["NVFP4"].append(name)
            self.used.update(n for n in self.stored if n.startswith(base + "."))
            return None
        if len(spec.shape) == 2 and plain is None:
            if f"{base}.weight_packed" in self.stored:
                return self._packed(base, spec)
            if f"{base}.qweight" in self.stored:
                return self._awq(base, spec)
        if plain is not None and plain.dtype == "F8_E4M3":
            return self._block_fp8(name, spec)
        if plain is not None and plain.dtype == "I8":
            return self._int8(name, spec)
        values = self.take(name, _PLAIN, spec.shape)
        if values is None:
            return None
        if name.endswith(_CORRECTION_BIAS) and values.dtype not in _WIDE:
            self.problems["wrong dtype"].append(
                f"{name} is {values.dtype}: a correction bias below fp32 changes the routing"
            )
        return StoredWeight(Scheme.PLAIN, spec.shape, {"values": values})

    def _block_fp8(self, name: str, spec: TensorSpec) -> StoredWeight | None:
        values = self.take(name, ("F8_E4M3",), spec.shape)
        blocks = tuple(-(-size // BLOCK) for size in spec.shape)
        scales = self.take(name + "_scale_inv", ("F32", "BF16"), blocks)
        if values is None or scales is None:
            return None
        return StoredWeight(Scheme.BLOCK_FP8, spec.shape, {"values": values, "scales": scales})

    def _int8(self, name: str, spec: TensorSpec) -> StoredWeight | None:
        values = self.take(name, ("I8",), spec.shape)
        scales, group = self._scales(name + "_scale", spec)
        if values is None or scales is None:
            return None
        parts = {"values": values, "scales": scales}
        return StoredWeight(Scheme.INT8, spec.shape, parts, 8, group)

    def _packed(self, base: str, spec: TensorSpec) -> StoredWeight | None:
        rows, columns = spec.shape
        self.used.add(base + ".weight_shape")  # says what `spec` says
        words = {bits: -(-columns * bits // 32) for bits in (4, 8)}
        values = self.take(base + ".weight_packed", ("I32",), (rows, words[4]), (rows, words[8]))
        scales, group = self._scales(base + ".weight_scale", spec)
        if values is None or scales is None:
            return None
        bits = 4 if values.shape[1] == words[4] else 8
        parts = {"values": values, "scales": scales}
        if base + ".weight_zero_point" in self.stored:
            shape = (-(-rows * bits // 32), scales.shape[1])
            zeros = self.take(base + ".weight_zero_point", ("I32",), shape)
            if zeros is None:
                return None
            parts["zeros"] = zeros
        return StoredWeight(Scheme.PACKED, spec.shape, parts, bits, group)

    def _scales(self, name: str, spec: TensorSpec) -> tuple[StoredTensor | None, int]:
        """Scales [out, groups] and the columns of a group; the number of groups is what it is."""
        rows, columns = spec.shape
        tensor = self.stored.get(name)
        groups = tensor.shape[1] if tensor and len(tensor.shape) == 2 else 1
        if not 0 < groups <= columns or columns % groups:
            groups = 1  # `take` says that the shape is wrong
        return self.take(name, _PLAIN, (rows, groups)), columns // groups

    def _awq(self, base: str, spec: TensorSpec) -> StoredWeight | None:
        rows, columns = spec.shape
        values = self.take(base + ".qweight", ("I32",), (columns, rows // 8))
        tensor = self.stored.get(base + ".scales")
        groups = tensor.shape[0] if tensor and len(tensor.shape) == 2 else 1
        if not 0 < groups <= columns or columns % groups:
            groups = 1
        scales = self.take(base + ".scales", _PLAIN, (groups, rows))
        zeros = self.take(base + ".qzeros", ("I32",), (groups, rows // 8))
        if values is None or scales is None or zeros is None:
            return None
        parts = {"values": values, "scales": scales, "zeros": zeros}
        return StoredWeight(Scheme.AWQ, spec.shape, parts, 4, columns // groups)

    def check(self) -> None:
        p = self.problems
        if p["NVFP4"]:
            raise CheckpointError(
                "NVFP4 weights are not served: Hopper GPUs have no 4-bit float arithmetic; take "
                f"the block-fp8 or an int4 checkpoint of the model. Found: {_list(p['NVFP4'])}"
            )
        lines = [f"{kind}: {_list(names)}" for kind, names in p.items() if names]
        if lines:
            raise CheckpointError(
                "the checkpoint does not fit its config.json; " + "; ".join(lines)
            )


def _list(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
