# SPDX-License-Identifier: Apache-2.0
"""`glmserve inspect` and `glmserve ledger`: tables about a model, computed without a GPU."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections import Counter
from typing import Any, Final

from glmserve.cache_format import CacheFormat
from glmserve.checkpoint.declared import Source, open_source
from glmserve.checkpoint.ledger import LINK_RATE, MEMORY_RATE, Ledger, Operator, ledger
from glmserve.checkpoint.memory_plan import H200_GB, MemoryPlan, memory_plan
from glmserve.checkpoint.placement import held_weights, stored_bytes
from glmserve.config import EngineConfig
from glmserve.errors import ConfigError

_MODEL = "checkpoint directory, config.json, or glm-5.2-fp8"
_CACHES: Final[dict[str, CacheFormat]] = {"fp8": "fp8", "bf16": "model"}  # the model runs in bf16


def add_subcommands(subparsers: Any) -> None:
    """Adds `inspect` and `ledger`; each sets `args.run`."""
    inspect = subparsers.add_parser("inspect", help="what a rank's memory holds, before loading")
    inspect.add_argument("model", help=_MODEL)
    inspect.add_argument("--ranks", type=int, default=8)
    inspect.add_argument("--kv", choices=_CACHES, default="fp8", help="cache rows")
    inspect.add_argument("--expert-layout", choices=["ep", "sliced"], default="ep")
    inspect.add_argument("--drafts", type=int, default=5, help="MTP draft tokens a step")
    inspect.add_argument("--max-rows", type=int, default=64, help="requests at the same time")
    inspect.add_argument("--chunk", type=int, default=256, help="prefill tokens a step")
    inspect.add_argument("--max-model-len", type=int, default=0, help="0 = the longest that fits")
    inspect.add_argument(
        "--memory-gb", type=float, default=H200_GB, help=f"of a GPU, 10^9 bytes; {H200_GB:g}: H200"
    )
    inspect.add_argument("--json", action="store_true")
    inspect.set_defaults(run=run_inspect)

    steps = subparsers.add_parser("ledger", help="bytes, flops and floors of a decode step")
    steps.add_argument("model", help=_MODEL)
    steps.add_argument("--ranks", type=int, default=8)
    steps.add_argument("--rows", type=int, default=1, help="target rows: requests * (drafts + 1)")
    steps.add_argument("--context", type=int, default=8192, help="tokens of each request")
    steps.add_argument("--drafts", type=int, default=0, help="MTP draft tokens a step")
    steps.add_argument("--kv", choices=_CACHES, default="fp8", help="cache rows")
    steps.add_argument("--expert-layout", choices=["ep", "sliced"], default="ep")
    steps.add_argument(
        "--replicate-eh-proj", action="store_true", help="count eh_proj whole on every rank"
    )
    steps.add_argument("--json", action="store_true")
    steps.set_defaults(run=run_ledger)


def run_inspect(args: argparse.Namespace) -> int:
    """Prints the checkpoint's contents and one rank's memory; 1 when it does not fit."""
    source = open_source(args.model)
    engine = EngineConfig(
        args.model,
        ranks=args.ranks,
        device="cuda",
        dtype="bf16",
        collectives="nccl",
        expert_layout=args.expert_layout,
        kv_dtype=_CACHES[args.kv],
        drafts=args.drafts,
        max_rows=args.max_rows,
        chunk=args.chunk,
        max_model_len=args.max_model_len,
        num_pages=0,
    )
    source.config.check_ranks(engine.ranks, engine.expert_layout)
    plan = memory_plan(source, engine, args.memory_gb * 1e9)
    held = held_weights(
        source.config, source.weights, 0, engine.ranks, engine.expert_layout, keep=True
    )
    if args.json:
        print(json.dumps(_plan_record(source, plan, stored_bytes(held)), indent=1))
    else:
        _print_source(source)
        print(f"a rank of {engine.ranks} reads {stored_bytes(held) / 1e9:.2f} GB of files\n")
        _print_table(("one rank", "GB"), plan.table())
    try:
        plan.check()
    except ConfigError as error:
        print(f"glmserve inspect: does not fit: {error}", file=sys.stderr)
        return 1
    return 0


def _print_source(source: Source) -> None:
    sizes: Counter[str] = Counter()
    for weight in source.weights.values():
        form = weight.scheme.value
        if weight.bits:
            form += f", {weight.bits} bits, groups of {weight.group}"
        elif form == "plain":
            form = weight.parts["values"].dtype
        sizes[form] += sum(part.nbytes for part in weight.parts.values())
    count = sum(len(weight.parts) for weight in source.weights.values())
    origin = "no files: as its config.json declares"
    if source.headers is not None:
        origin = f"{len(source.headers.digests)} files, headers {source.headers.digest[:16]}"
        count = len(source.headers.tensors)
    print(f"{count:,} tensors, {sum(sizes.values()):,} bytes; {origin}")
    for form, size in sizes.most_common():
        print(f"  {form}: {size / 1e9:.3f} GB")


def _plan_record(source: Source, plan: MemoryPlan, read: int) -> dict[str, Any]:
    return {
        "tensors": None if source.headers is None else len(source.headers.tensors),
        "headers": None if source.headers is None else source.headers.digest,
        "rank_stored_bytes": read,
        **dataclasses.asdict(plan),
        "requests_at_once": {context: plan.at_once(context) for context in (8192, 102400, 1 << 20)},
    }


def run_ledger(args: argparse.Namespace) -> int:
    """Prints the step of one rank; every figure is a product of shapes."""
    made = ledger(
        open_source(args.model, files=False),
        args.ranks,
        args.rows,
        args.context,
        args.drafts,
        args.expert_layout,
        _CACHES[args.kv],
        args.replicate_eh_proj,
    )
    if args.json:
        print(json.dumps(_ledger_record(made), indent=1))
        return 0
    head = ("operator", "GB", "GFLOP", "memory us", "flops us")
    _print_table(head, [_operator(o) for o in (*made.operators, *made.drafting)])
    print(
        f"experts hit a layer: {made.experts_hit:.2f} of a rank's, busiest rank"
        f" {made.experts_hit_busiest:.2f}\n"
    )
    _print_table(
        ("collective", "count", "KB each", "one-shot MB", "two-shot MB", "us"),
        [
            (
                c.name,
                str(c.count),
                f"{c.payload / 1e3:.1f}",
                f"{c.one_shot / 1e6:.2f}",
                f"{c.two_shot / 1e6:.2f}",
                f"{c.floor * 1e6:.1f}",
            )
            for c in made.collectives
        ],
    )
    links = sum(c.floor for c in made.collectives)
    print(
        f"step: {made.bytes / 1e9:.2f} GB; floor {made.floor * 1e3:.2f} ms at"
        f" {MEMORY_RATE / 1e12:g} TB/s, {made.operator_floor * 1e3:.2f} ms operator by operator,"
        f" links {links * 1e3:.2f} ms at {LINK_RATE / 1e9:g} GB/s"
    )
    return 0


def _operator(o: Operator) -> tuple[str, ...]:
    high = "" if o.high is None or o.high == o.bytes else f" to {o.high / 1e9:.3f}"
    return (
        o.name,
        f"{o.bytes / 1e9:.3f}{high}",
        f"{o.flops / 1e9:.2f}",
        f"{o.bytes / MEMORY_RATE * 1e6:.1f}",
        f"{o.flops / o.rate * 1e6:.1f}",
    )


def _ledger_record(made: Ledger) -> dict[str, Any]:
    record = dataclasses.asdict(made)
    for part in ("operators", "drafting"):
        for entry, operator in zip(record[part], getattr(made, part), strict=True):
            entry["floor_us"] = operator.floor * 1e6
    return record | {
        "bytes": made.bytes,
        "floor_ms": made.floor * 1e3,
        "operator_floor_ms": made.operator_floor * 1e3,
        "links_ms": sum(c.floor for c in made.collectives) * 1e3,
    }


def _print_table(head: tuple[str, ...], lines: list[Any]) -> None:
    rows = [head, *lines]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        print("  ".join(cells).rstrip())
    print()
