# SPDX-License-Identifier: Apache-2.0
"""What `aot.py` and `kernels.py` know of an operator: one module `bench/operators/<operator>.py`.

Such a module defines

    def launches(device: torch.device) -> Iterator[tuple[str, Callable[[], object]]]
        Names and calls that launch every shipped configuration of the operator's kernels with
        uninitialised tensors. `aot.py` calls them on the meta device and compiles what they would
        launch, so a configuration exists in one place: the launch code of the operator.

    def cases() -> Iterator[Case]
        What is checked against the reference and timed on a GPU, at GLM's real shapes.

    SPILLS: dict[str, str]      optional; kernel name -> why its spills are accepted
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType

import bench.operators


@dataclass
class Problem:
    """Inputs of one case on the GPU."""

    launch: Callable[[int], object]  # runs the operator once on input set i
    sets: int  # input sets to rotate over: together at least 200 MB unless the case is warm
    error: Callable[[], float]  # relative error of the outputs that launch(0) left behind
    launches: int = 20  # launches in one graph
    exact: Callable[[], bool] | None = None  # further demands on the outputs of launch(0)


@dataclass
class Case:
    operator: str
    shape: str
    build: Callable[[], Problem]
    floor_us: float | None
    tolerance: float  # of Problem.error
    peer_us: float | None = None
    target_us: float | None = None
    notes: dict[str, object] = field(default_factory=dict)


def modules(names: list[str] | None = None) -> list[ModuleType]:
    """The operator modules, all of them or those named."""
    found = sorted(m.name for m in pkgutil.iter_modules(bench.operators.__path__))
    unknown = set(names or ()) - set(found)
    if unknown:
        raise SystemExit(f"no bench/operators module for {sorted(unknown)}; there are {found}")
    return [importlib.import_module(f"bench.operators.{name}") for name in names or found]


def memory_us(bytes_: float, tb_per_s: float = 4.3) -> float:
    """Microseconds to move some bytes through device memory at the measured copy rate."""
    return bytes_ / tb_per_s / 1e6


def arithmetic_us(flops: float, tflop_per_s: float) -> float:
    return flops / tflop_per_s / 1e6
