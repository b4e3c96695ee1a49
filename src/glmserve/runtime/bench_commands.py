# SPDX-License-Identifier: Apache-2.0
"""`glmserve bench-rank`: one rank of N alone on this machine's device, timed step by step."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glmserve.checkpoint.declared import open_source
from glmserve.config import PAGE_SIZE, EngineConfig, cuda_devices
from glmserve.errors import ConfigError

if TYPE_CHECKING:
    from glmserve.runtime.lone_rank import LoneRank
    from glmserve.runtime.rank_bench import Case

_PEER_ROWS = 2048  # of a boundary over peers' memory, as a server's ranks have it
_SHOWN_SECTIONS = 12


def add_subcommands(subparsers: Any) -> None:
    """Adds `bench-rank`; it sets `args.run`."""
    bench = subparsers.add_parser("bench-rank", help="one rank of N alone, its steps timed")
    bench.add_argument(
        "--config", required=True, help="checkpoint directory, config.json or glm-5.2-fp8"
    )
    bench.add_argument("--ranks", type=int, default=8, help="that share the model")
    bench.add_argument("--rank", type=int, default=0, help="which of them is measured")
    bench.add_argument("--synthetic", action="store_true", help="random weights, no files of them")
    bench.add_argument(
        "--expert-layout",
        choices=["ep", "sliced"],
        default="ep",
        help="whole experts a rank, or columns",
    )
    bench.add_argument("--device", choices=["cpu", "cuda"], help="default: a GPU if there is one")
    bench.add_argument(
        "--dtype", choices=["fp64", "fp32", "bf16"], help="default: bf16 on a GPU, else fp32"
    )
    bench.add_argument(
        "--rows", type=_numbers, default=[1, 6, 32, 192], help="of a decode step: 1,6,32,192"
    )
    bench.add_argument("--context", type=_numbers, default=[8192], help="tokens of each request")
    bench.add_argument(
        "--drafts",
        type=_numbers,
        default=[0, 5],
        help="rows take the most of these that make whole requests of them",
    )
    bench.add_argument("--prefill", type=int, default=0, help="also a prompt of so many tokens")
    bench.add_argument("--chunk", type=_numbers, default=[8192], help="its tokens a step")
    bench.add_argument("--memory-gb", type=float, help="of the GPU, 10^9 bytes; default: all free")
    bench.add_argument("--no-split", action="store_true", help="no profile")
    bench.add_argument("--sections", action="store_true", help="print the kernels in order")
    bench.add_argument("--json", type=Path, help="file to write the record to")
    bench.set_defaults(run=run_bench_rank)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def settings(args: argparse.Namespace, requests: int) -> EngineConfig:
    """The engine's settings of the widest case."""
    on_cuda = (args.device or ("cuda" if cuda_devices() else "cpu")) == "cuda"
    return EngineConfig(
        args.config,
        ranks=args.ranks,
        device="cuda" if on_cuda else "cpu",
        dtype=args.dtype or ("bf16" if on_cuda else "fp32"),
        collectives="nccl" if on_cuda else "shm",
        expert_layout=args.expert_layout,
        synthetic=args.synthetic,
        drafts=max(args.drafts),
        max_rows=requests,
        chunk=max(256, *args.chunk) if args.prefill else 256,
        max_model_len=max([*args.context, args.prefill]) + PAGE_SIZE,
    )


def run_bench_rank(args: argparse.Namespace) -> int:
    # torch takes seconds to import, and no other command of this process needs it.
    from glmserve.parallel.stand_in import StandInGroup
    from glmserve.runtime import rank_bench as measured
    from glmserve.runtime.lone_rank import open_rank, pages_of

    source = open_source(args.config, files=False)
    wanted = measured.cases(args.rows, args.context, args.drafts)
    config = settings(args, max(case.requests for case in wanted))
    source.config.check_ranks(config.ranks, config.expert_layout)
    if not 0 <= args.rank < args.ranks:
        raise ConfigError("rank", args.rank, f"must be in 0..{args.ranks - 1}")
    pages = 1 + max(
        *(case.requests * pages_of(case.context, case.drafts) for case in wanted),
        pages_of(max(args.prefill, 1), config.drafts),
    )
    record: dict[str, Any] = measured.machine(config.device) | {
        "date": time.strftime("%Y-%m-%d"),
        "config": Path(args.config).name,
        "rank": f"{args.rank} of {args.ranks}, experts {args.expert_layout}",
    }
    group = StandInGroup(args.rank, args.ranks)
    if config.device == "cuda":
        group.share_memory(_PEER_ROWS, source.config.hidden_size)
    memory = (args.memory_gb or 0) * 1e9 or measured.free_memory(config.device)
    rank = open_rank(source, config, group, pages, memory, print)
    record["cache_pages"] = rank.config.num_pages
    record["rows"] = []
    for rows in _measured(rank, wanted, args):
        record["rows"] += [_shown(row, args.sections) for row in rows]
        record["memory"] = measured.memory_record(rank)
        if args.json:  # after each case: a run that is cut short leaves what it had
            args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


def _measured(
    rank: LoneRank, wanted: list[Case], args: argparse.Namespace
) -> Iterator[list[dict[str, Any]]]:
    from glmserve.runtime.rank_bench import Decode, Prefill

    with_split = not args.no_split
    for case in wanted:
        decode = Decode(rank, case)
        yield decode.measure(decode.prepare(), with_split)
        del decode
    for chunk in args.chunk if args.prefill else ():
        yield [Prefill(rank, args.prefill, chunk, rank.config.drafts).measure(3, with_split)]


def _shown(row: dict[str, Any], with_sections: bool) -> dict[str, Any]:
    """Prints a row; returns what the record keeps of it."""
    found = row.pop("sections")
    floor = f", floor {row['floor_ms']:.2f}" if "floor_ms" in row else ""
    print(
        f"{row['part']}: {row['rows']} rows, context {row['context']}, {row['drafts']} drafts:"
        f" {row['ms']:.3f} ms{floor}"
    )
    print("  " + ", ".join(f"{name} {ms:.3f}" for name, ms in row["split"].items()), flush=True)
    for section in found[:_SHOWN_SECTIONS] if with_sections else ():
        print(f"  {section.count} x {section.us:.1f} us")
        for kernel in section.kernels:
            print(f"    {kernel.us:7.2f} +{kernel.gap_us:.2f}  {kernel.operator}/{kernel.name}")
    return row
