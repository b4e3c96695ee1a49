# SPDX-License-Identifier: Apache-2.0
"""Plain weights into each scheme that a checkpoint may use: round to nearest, no calibration.

For small checkpoints, synthetic weights and tests. Every function returns the stored parts by the
ending that follows the module's name. The inverse is `dequantise`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from glmserve.checkpoint.dequantise import AWQ_ORDER
from glmserve.checkpoint.formats import BLOCK

Parts = dict[str, Tensor]
_SMALLEST = 1e-12  # scale of a group of zeros


def block_fp8(weight: Tensor) -> Parts:
    """e4m3 and scale = max|w| / 448 of each 128 x 128 block; last blocks may be ragged."""
    rows, columns = weight.shape
    tall, wide = -(-rows // BLOCK), -(-columns // BLOCK)
    padded = weight.new_zeros(tall * BLOCK, wide * BLOCK, dtype=torch.float32)
    padded[:rows, :columns] = weight
    blocks = padded.view(tall, BLOCK, wide, BLOCK)
    scales = (blocks.abs().amax((1, 3)) / 448.0).clamp_min(_SMALLEST)
    values = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn).view(padded.shape)
    return {".weight": values[:rows, :columns].contiguous(), ".weight_scale_inv": scales}


def packed_int(weight: Tensor, bits: int, group: int, symmetric: bool) -> Parts:
    """compressed-tensors pack-quantized; group = columns of a scale, all of them for per channel.
    Scales are bf16; rows and columns are multiples of 32 / bits."""
    rows, columns = weight.shape
    q, scales, zeros = _integers(weight, bits, group, symmetric)
    half = 1 << (bits - 1)
    parts = {
        ".weight_packed": pack(q.flatten(1) + half, bits),
        ".weight_scale": scales,
        ".weight_shape": torch.tensor([rows, columns]),
    }
    if not symmetric:
        parts[".weight_zero_point"] = pack((zeros + half).t(), bits).t().contiguous()
    return parts


def int8(weight: Tensor, group: int) -> Parts:
    """compressed-tensors int-quantized: symmetric bytes."""
    q, scales, _ = _integers(weight, 8, group, symmetric=True)
    return {".weight": q.flatten(1).to(torch.int8), ".weight_scale": scales}


def awq(weight: Tensor, group: int) -> Parts:
    """AutoAWQ: asymmetric int4 with fp16 scales, transposed, nibbles interleaved along outputs."""
    q, scales, zeros = _integers(weight, 4, group, symmetric=False)

    def words(numbers: Tensor) -> Tensor:  # [n, out] of -8..7
        order = torch.tensor(AWQ_ORDER, device=numbers.device)
        return pack((numbers + 8).unflatten(-1, (-1, 8))[..., order].flatten(-2), 4)

    return {
        ".qweight": words(q.flatten(1).t()),
        ".qzeros": words(zeros.t()),
        ".scales": scales.t().to(torch.float16).contiguous(),
    }


def pack(numbers: Tensor, bits: int) -> Tensor:
    """[r, c] of unsigned numbers -> [r, c * bits / 32] int32, the first in the lowest bits."""
    each = 32 // bits
    shifts = torch.arange(0, 32, bits, device=numbers.device)
    words = (numbers.long().unflatten(-1, (-1, each)) << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _integers(
    weight: Tensor, bits: int, group: int, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """q [out, groups, group], bf16 scales [out, groups], zero points [out, groups]; signed."""
    groups = weight.float().unflatten(1, (-1, group))
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    if symmetric:
        scales = (groups.abs().amax(-1) / (high + 0.5)).clamp_min(_SMALLEST).bfloat16()
        zeros = torch.zeros_like(scales, dtype=torch.int32)
    else:
        bottom, top = groups.amin(-1).clamp_max(0.0), groups.amax(-1).clamp_min(0.0)
        scales = ((top - bottom) / (high - low)).clamp_min(_SMALLEST).bfloat16()
        zeros = (low - bottom / scales.float()).round().clamp(low, high).to(torch.int32)
    q = (groups / scales.float()[..., None]).round() + zeros[..., None]
    return q.clamp(low, high).to(torch.int32), scales, zeros


Quantise = Callable[[Tensor], Parts]

# What `make-checkpoint --format` writes: for the name of a weight how it is stored, None = plain.
_PLAIN_NAMES = ("embed_tokens", "lm_head", "norm", "mlp.gate.", "weights_proj", "eh_proj")


def _plain(name: str) -> bool:
    return not name.endswith(".weight") or any(part in name for part in _PLAIN_NAMES)


def _fp8(name: str) -> Quantise | None:
    return None if _plain(name) else block_fp8


def _int4(group: int, symmetric: bool) -> Callable[[str], Quantise | None]:
    def choose(name: str) -> Quantise | None:
        if ".mlp.experts." in name:
            return lambda weight: packed_int(weight, 4, group, symmetric)
        return None

    return choose


def _mix(name: str) -> Quantise | None:
    """int4 experts; int8 attention, dense and shared FFN beyond layer 0; the indexer plain."""
    if _plain(name) or ".indexer." in name or name.startswith("model.layers.0."):
        return None
    bits = 4 if ".mlp.experts." in name else 8
    return lambda weight: packed_int(weight, bits, min(128, weight.shape[1]), True)


def _awq(name: str) -> Quantise | None:
    return (lambda weight: awq(weight, 32)) if ".mlp.experts." in name else None


FORMATS: Mapping[str, Callable[[str], Quantise | None]] = {
    "bf16": lambda name: None,
    "fp8": _fp8,
    "int4": _int4(32, symmetric=False),
    "int4-g128": _int4(128, symmetric=True),
    "int4-int8": _mix,
    "awq": _awq,
}


def declaration(format: str) -> dict[str, Any]:
    """The `quantization_config` entry of a config.json in this format."""
    if format == "bf16":
        return {}
    if format == "fp8":
        found: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3"}
        found |= {"activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    elif format == "awq":
        found = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
    else:
        group = 32 if format == "int4" else 128
        weights = {"num_bits": 4, "type": "int", "group_size": group, "strategy": "group"}
        weights |= {"symmetric": format != "int4"}
        groups = {"group_0": {"weights": weights, "targets": ["Linear"]}}
        found = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
        found |= {"config_groups": groups}
    return {"quantization_config": found}


def quantise(tensors: Mapping[str, Tensor], format: str) -> dict[str, Tensor]:
    """All tensors of a checkpoint, those that the format quantises replaced by their parts."""
    out: dict[str, Tensor] = {}
    for name, value in tensors.items():
        make = FORMATS[format](name)
        if make is None:
            out[name] = value
            continue
        base = name.removesuffix(".weight")
        out.update({base + ending: part for ending, part in make(value).items()})
    return out
