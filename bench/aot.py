# SPDX-License-Identifier: Apache-2.0
"""Compiles every shipped kernel configuration for sm_90 without a GPU: `make aot`.

Records registers, spills and shared memory in bench/results/aot.json and fails on a spill that the
operator's module does not explain, on more shared memory than an SM has, or on a compile error.
Launch code runs unchanged on the meta device; only the launch itself is intercepted.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # before triton is imported
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction, create_function_from_signature

from bench.registry import modules

TARGET = GPUTarget("cuda", 90, 32)
SHARED_LIMIT = 232448  # bytes a CTA can have on an H200
RESULTS = ROOT / "bench" / "results" / "aot.json"


@contextmanager
def intercepted(launched: Callable[..., None]) -> Iterator[None]:
    """Kernel launches call `launched(kernel, args, kwargs)` instead of running."""
    original = JITFunction.run

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launched(self, args, kwargs)

    JITFunction.run = record
    try:
        yield
    finally:
        JITFunction.run = original


def source_of(kernel: Any, args: Any, kwargs: Any) -> tuple[ASTSource, dict[str, Any]]:
    """What Triton would compile for this launch, specialised the way that a launch specialises."""
    kwargs = {**kwargs, "debug": False}
    backend = make_backend(TARGET)
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = binder(*args, **kwargs)
    options, signature, constexprs, attrs = kernel._pack_args(
        backend, kwargs, bound, specialization, options
    )
    source = GluonASTSource if kernel.is_gluon() else ASTSource
    return source(kernel, signature, constexprs, attrs), options.__dict__


def ptxas_report(ptx: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        done = subprocess.run(
            [str(tool), "-v", "--gpu-name=sm_90a", file.name, "-o", os.devnull],
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        )
    return done.stdout + done.stderr


def compile_row(module: str, kernel: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    source, options = source_of(kernel, args, kwargs)
    started = time.monotonic()
    compiled = triton.compile(source, target=TARGET, options=options)
    report = ptxas_report(compiled.asm["ptx"])

    def number(pattern: str) -> int:
        match = re.search(pattern, report)
        return int(match.group(1)) if match else 0

    names = kernel.arg_names
    constants = {names[path[0]]: str(value) for path, value in source.constants.items()}
    return {
        "operator": module,
        "kernel": kernel.__name__,
        "constants": constants,
        "types": " ".join(str(t) for t in source.signature.values() if t != "constexpr"),
        "num_warps": options["num_warps"],
        "num_stages": options["num_stages"],
        "registers": number(r"Used (\d+) registers"),
        "spill_bytes": number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        "shared_bytes": compiled.metadata.shared,
        "seconds": round(time.monotonic() - started, 2),
    }


def same_kernel(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether two operators ship the same kernel: one launches the other's."""
    return all(a[key] == b[key] for key in a if key not in ("operator", "seconds", "reason"))


def innermost(error: BaseException) -> str:
    """Triton wraps an error once for each jit function that it was compiling."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error)[-800:]}"


def compile_module(name: str) -> tuple[list[dict[str, Any]], list[str]]:
    """All distinct kernels of one operator module: (rows, failures)."""
    (module,) = modules([name])
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    seen: set[str] = set()

    def launched(kernel: Any, args: Any, kwargs: Any) -> None:
        source, options = source_of(kernel, args, kwargs)
        key = source.hash() + json.dumps(options, default=str, sort_keys=True)
        if key in seen:
            return
        seen.add(key)
        try:
            row = compile_row(name, kernel, args, kwargs)
        except Exception as error:
            failures.append(f"{name}: {kernel.__name__}: {innermost(error)}")
            return
        row["reason"] = getattr(module, "SPILLS", {}).get(row["kernel"])
        rows.append(row)
        if row["spill_bytes"] and not row["reason"]:
            failures.append(
                f"{name}: {row['kernel']} {row['constants']}: {row['spill_bytes']} B spilt"
            )
        if row["shared_bytes"] > SHARED_LIMIT:
            failures.append(f"{name}: {row['kernel']}: {row['shared_bytes']} B of shared memory")

    with intercepted(launched):
        for label, call in module.launches(torch.device("meta")):
            try:
                call()
            except Exception as error:
                failures.append(f"{name}: {label}: {type(error).__name__}: {error}")
    return rows, failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("operators", nargs="*", help="module names; all by default")
    parser.add_argument("--jobs", type=int, default=min(16, os.cpu_count() or 1))
    parser.add_argument("--output", type=Path, help="default: bench/results/aot.json, if all ran")
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    names = [m.__name__.rpartition(".")[2] for m in modules(arguments.operators or None)]
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    context = multiprocessing.get_context("spawn")
    started = time.monotonic()
    with context.Pool(min(arguments.jobs, len(names))) as pool:
        for part, failed in pool.imap(compile_module, names):
            rows += [row for row in part if not any(same_kernel(row, other) for other in rows)]
            failures += failed
    if arguments.verbose:
        for row in rows:
            print(
                f"{row['operator']:14} {row['kernel']:24} regs {row['registers']:3} "
                f"spill {row['spill_bytes']:4} shared {row['shared_bytes']:6} "
                f"{row['seconds']:5} s {row['constants']}"
            )
    seconds = round(time.monotonic() - started)
    print(f"{len(rows)} configurations of {len(names)} operators compiled in {seconds} s")
    if len(rows) > 200:
        failures.append(f"{len(rows)} configurations are shipped; 200 is the limit")
    output = arguments.output or (None if arguments.operators else RESULTS)
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        for row in rows:
            del row["seconds"]  # would change the committed file with every run
        table = {"triton": triton.__version__, "target": "sm_90a", "rows": rows}
        output.write_text(json.dumps(table, indent=1) + "\n")
    for failure in failures:
        print("FAIL", failure)
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
