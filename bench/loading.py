# SPDX-License-Identifier: Apache-2.0
"""Loading against plain reads of the same files: `python bench/loading.py --gb 20 --folder DIR`.

Makes a block-fp8 checkpoint of GLM-5.2's shapes with as many experts and layers as give the size,
then, in turn, reads its files with plain preads and loads them as a rank of one, both with cold
page caches (written back, then dropped) and as many threads. Prints medians; --out writes JSON.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import statistics
import struct
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from glmserve.checkpoint.declared import CONFIGS, declared_weights
from glmserve.checkpoint.loader import CHUNK, THREADS
from glmserve.checkpoint.reader import open_share
from glmserve.checkpoint.safetensors_header import INDEX_NAME, ITEM_BYTES
from glmserve.model_config import ModelConfig

_SHARD = 5 << 30  # bytes of a file, as in the release
_WRITERS = 4  # files written at once
_POOL = 256 << 20  # random bytes, written again and again from different places


def small_config(gb: float) -> dict[str, Any]:
    """GLM-5.2 with three dense layers and routed ones whose experts bring the size to `gb`."""
    raw: dict[str, Any] = json.loads((CONFIGS / "glm-5.2-fp8.json").read_text(encoding="utf-8"))
    raw.update(vocab_size=8192, num_nextn_predict_layers=0, eos_token_id=0, pad_token_id=0)
    del raw["indexer_types"]
    expert = 3 * 6144 * 2048
    layers, experts = 1, 8
    while 1.25e9 + layers * (0.25e9 + experts * expert) < gb * 1e9:
        if experts == 256:
            layers, experts = layers + 1, 8
        experts += 8
    return raw | {"num_hidden_layers": 3 + layers, "n_routed_experts": experts}


def stored_entries(config: ModelConfig) -> list[tuple[str, str, tuple[int, ...]]]:
    """(name, dtype, shape) of every stored tensor, sorted by name."""
    quantization = {"quant_method": "fp8"}
    entries = []
    for name, weight in declared_weights(config, quantization).items():
        for role, tensor in weight.parts.items():
            ending = "_scale_inv" if role == "scales" else ""
            entries.append((name + ending, tensor.dtype, tensor.shape))
    return sorted(entries)


def write_checkpoint(folder: Path, raw: dict[str, Any]) -> int:
    """Writes config, index and shards of random bytes, back to the disk; returns their bytes."""
    (folder / "config.json").write_text(json.dumps(raw))
    shards: list[list[tuple[str, str, tuple[int, ...]]]] = [[]]
    filled = 0
    for name, dtype, shape in stored_entries(ModelConfig.from_dict(raw)):
        size = math.prod(shape) * ITEM_BYTES[dtype]
        if filled + size > _SHARD:
            shards.append([])
            filled = 0
        shards[-1].append((name, dtype, shape))
        filled += size
    names = [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    pool = np.random.default_rng(0).integers(0, 256, _POOL, dtype=np.uint8)
    with ThreadPoolExecutor(_WRITERS) as writers:
        sizes = list(
            writers.map(
                lambda number: write_shard(folder / names[number], shards[number], pool, number),
                range(len(shards)),
            )
        )
    weight_map = {
        entry[0]: name for name, shard in zip(names, shards, strict=True) for entry in shard
    }
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    return sum(sizes)


def write_shard(
    file: Path, entries: list[tuple[str, str, tuple[int, ...]]], pool: Any, seed: int
) -> int:
    """One file, its tensors from parts of the pool; returns their bytes."""
    header, end = {}, 0
    for name, dtype, shape in sorted(entries, key=lambda e: (-ITEM_BYTES[e[1]], e[0])):
        begin, end = end, end + math.prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        done = 0
        while done < end:
            start = ((done + seed * _SHARD) * 4099) % (_POOL // 2)
            part = pool[start : start + min(end - done, _POOL // 2)]
            stream.write(part)
            done += len(part)
        stream.flush()
        os.fsync(stream.fileno())
    return end


def drop(files: list[Path]) -> None:
    """Takes the files out of the page cache; they are written back already."""
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def plain_read(files: list[Path], threads: int) -> None:
    """Every byte of the files once, in ranges of CHUNK, into memory that is used again."""
    ranges = [(file, at) for file in files for at in range(0, file.stat().st_size, CHUNK)]
    handles = {file: os.open(file, os.O_RDONLY) for file in files}
    buffers = [bytearray(CHUNK) for _ in range(threads)]

    def worker(number: int) -> None:
        for file, at in ranges[number::threads]:
            end = min(at + CHUNK, file.stat().st_size)
            while at < end:
                at += os.preadv(handles[file], [memoryview(buffers[number])[: end - at]], at)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(worker, range(threads)))
    for handle in handles.values():
        os.close(handle)


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(
    folder: Path, raw: dict[str, Any], total: int, args: argparse.Namespace
) -> dict[str, Any]:
    files = sorted(folder.glob("*.safetensors"))
    config = ModelConfig.from_dict(raw)
    device = torch.device(args.device)
    seconds: dict[str, list[float]] = {"plain": [], "headers": [], "loader": []}
    for _ in range(args.repeat):
        drop(files)
        seconds["plain"].append(timed(lambda: plain_read(files, args.threads)))
        drop(files)
        start = time.perf_counter()
        share = open_share(folder, config, 0, 1, "ep", torch.bfloat16, device, keep=True)
        seconds["headers"].append(time.perf_counter() - start)

        def load(share: Any = share) -> None:
            share.load(print if args.verbose else None, args.threads)
            if device.type == "cuda":
                torch.cuda.synchronize()

        seconds["loader"].append(timed(load))
        if device.type == "cuda":
            torch.cuda.empty_cache()
        print({kind: round(values[-1], 2) for kind, values in seconds.items()}, flush=True)
    speeds = {kind: total / 1e9 / statistics.median(seconds[kind]) for kind in ("plain", "loader")}
    return {
        "card": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "date": datetime.date.today().isoformat(),
        "bytes": total,
        "files": len(files),
        "threads": args.threads,
        "seconds": {kind: [round(s, 3) for s in values] for kind, values in seconds.items()},
        "gb_per_s": {kind: round(speed, 3) for kind, speed in speeds.items()},
        "share_of_plain": round(speeds["loader"] / speeds["plain"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=20.0, help="at least so much is read")
    parser.add_argument("--folder", type=Path, help="where the files are made (default: temporary)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=THREADS)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--verbose", action="store_true", help="show the progress lines")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="loading-") as name:
        raw = small_config(args.gb)
        start = time.perf_counter()
        total = write_checkpoint(Path(name), raw)
        print(f"{total:,} bytes written in {time.perf_counter() - start:.1f} s", flush=True)
        record = measure(Path(name), raw, total, args)
    print(json.dumps(record, indent=1))
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
