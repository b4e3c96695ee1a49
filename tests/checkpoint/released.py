# SPDX-License-Identifier: Apache-2.0
"""The headers of the released block-fp8 checkpoint, from its table of tensors, in sparse files.

Written from the table of names, shapes and dtypes of the release, not from the code under test:
the files have the right size and hold nothing but headers.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path

LAYERS, DENSE, EXPERTS, SHARDS = 78, 3, 256, 141
_BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1}
Entry = tuple[str, str, tuple[int, ...]]  # name, dtype, shape


def is_full(layer: int) -> bool:
    return layer in (0, 1, 2, LAYERS) or layer % 4 == 2


def fp8(name: str, out: int, into: int) -> Iterator[Entry]:
    yield name, "F8_E4M3", (out, into)
    yield name + "_scale_inv", "F32", (math.ceil(out / 128), math.ceil(into / 128))


def mlp(prefix: str, inner: int) -> Iterator[Entry]:
    yield from fp8(prefix + "gate_proj.weight", inner, 6144)
    yield from fp8(prefix + "up_proj.weight", inner, 6144)
    yield from fp8(prefix + "down_proj.weight", 6144, inner)


def layer_tensors(i: int) -> Iterator[Entry]:
    p = f"model.layers.{i}."
    a = p + "self_attn."
    yield p + "input_layernorm.weight", "BF16", (6144,)
    yield p + "post_attention_layernorm.weight", "BF16", (6144,)
    yield from fp8(a + "q_a_proj.weight", 2048, 6144)
    yield a + "q_a_layernorm.weight", "BF16", (2048,)
    yield from fp8(a + "q_b_proj.weight", 16384, 2048)
    yield from fp8(a + "kv_a_proj_with_mqa.weight", 576, 6144)
    yield a + "kv_a_layernorm.weight", "BF16", (512,)
    yield from fp8(a + "kv_b_proj.weight", 28672, 512)
    yield from fp8(a + "o_proj.weight", 6144, 16384)
    if is_full(i):
        yield from fp8(a + "indexer.wq_b.weight", 4096, 2048)
        yield from fp8(a + "indexer.wk.weight", 128, 6144)
        yield a + "indexer.weights_proj.weight", "BF16", (32, 6144)
        yield a + "indexer.k_norm.weight", "BF16", (128,)
        yield a + "indexer.k_norm.bias", "BF16", (128,)
    if i < DENSE:
        yield from mlp(p + "mlp.", 12288)
    else:
        yield p + "mlp.gate.weight", "BF16", (256, 6144)
        yield p + "mlp.gate.e_score_correction_bias", "F32", (256,)
        yield from mlp(p + "mlp.shared_experts.", 2048)
        for expert in range(EXPERTS):
            yield from mlp(f"{p}mlp.experts.{expert}.", 2048)
    if i == LAYERS:
        for name in ("enorm", "hnorm", "shared_head.norm"):
            yield f"{p}{name}.weight", "BF16", (6144,)
        yield p + "eh_proj.weight", "BF16", (6144, 12288)


def tensors() -> list[Entry]:
    found: list[Entry] = [
        ("model.embed_tokens.weight", "BF16", (154880, 6144)),
        ("lm_head.weight", "BF16", (154880, 6144)),
        ("model.norm.weight", "BF16", (6144,)),
    ]
    for layer in range(LAYERS + 1):
        found += layer_tensors(layer)
    return found


def size(entry: Entry) -> int:
    return math.prod(entry[2]) * _BYTES[entry[1]]


def write_headers(directory: Path) -> int:
    """Writes SHARDS sparse files and their index; returns the bytes of all tensors."""
    entries = sorted(tensors())
    total = sum(size(entry) for entry in entries)
    shards: list[list[Entry]] = [[] for _ in range(SHARDS)]
    done = 0
    for entry in entries:
        shards[min(SHARDS - 1, done * SHARDS // total)].append(entry)
        done += size(entry)
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{SHARDS:05d}.safetensors"
        weight_map.update({name: file for name, _, _ in shard})
        header, end = {}, 0
        for name, dtype, shape in sorted(shard, key=lambda e: (-_BYTES[e[1]], e[0])):
            begin, end = end, end + size((name, dtype, shape))
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        raw = json.dumps(header).encode()
        raw += b" " * (-len(raw) % 8)
        with (directory / file).open("wb") as stream:
            stream.write(struct.pack("<Q", len(raw)) + raw)
            stream.truncate(8 + len(raw) + end)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return total
