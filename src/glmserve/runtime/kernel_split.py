# SPDX-License-Identifier: Apache-2.0
"""Where the time of a replayed step goes: its kernels in order, summed by operator and by section.

A kernel may start before the one ahead of it has ended (programmatic launch), so each is charged
with the time from the end of everything before it; time in which nothing runs is a gap. Charges and
gaps add up to the step.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

import glmserve.kernels

_JIT = re.compile(r"^@(?:triton|gluon)\.jit\b.*?^def (\w+)", re.MULTILINE | re.DOTALL)
_CUTS = ("boundary", "residual_norm")  # operators that end a section of a layer
GAPS = "gaps"


@dataclass(frozen=True)
class Charge:
    """One kernel of a step."""

    name: str
    operator: str
    us: float  # from the end of what ran before, or from its own start
    gap_us: float  # in which nothing ran before it


@dataclass(frozen=True)
class Section:
    """A run of kernels between two layer boundaries, averaged over its occurrences."""

    count: int
    kernels: tuple[Charge, ...]

    @property
    def us(self) -> float:
        return sum(kernel.us + kernel.gap_us for kernel in self.kernels)


@functools.cache
def operators() -> dict[str, str]:
    """The project's kernels: name -> the operator that it belongs to."""
    root = Path(glmserve.kernels.__file__).parent
    found: dict[str, str] = {}
    for source in sorted(root.rglob("*.py")):
        for name in _JIT.findall(source.read_text(encoding="utf-8")):
            found[name] = source.relative_to(root).parts[0].removesuffix(".py")
    return found


def operator_of(name: str) -> str:
    """An operator's name, or what else the kernel is."""
    if name in operators():
        return operators()[name]
    return "copies" if name.startswith(("Memcpy", "Memset")) else "torch"


def charges(events: Iterable[tuple[str, int, int]]) -> list[Charge]:
    """events: (name, start, end) in ns of everything that ran."""
    found: list[Charge] = []
    until: int | None = None
    for name, start, end in sorted(events, key=lambda event: event[1:]):
        begin = start if until is None else max(start, until)
        gap = 0 if until is None else max(0, start - until)
        found.append(Charge(name, operator_of(name), max(0, end - begin) / 1e3, gap / 1e3))
        until = end if until is None else max(until, end)
    return found


def split(kernels: Iterable[Charge]) -> dict[str, float]:
    """Milliseconds by operator, the largest first, and of gaps."""
    total: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        total[kernel.operator] += kernel.us / 1e3
        total[GAPS] += kernel.gap_us / 1e3
    return {name: round(total[name], 4) for name in sorted(total, key=lambda n: -total[n])}


def sections(kernels: Iterable[Charge]) -> list[Section]:
    """Sections that are made of the same kernels, averaged; those that take most time first."""
    same: dict[tuple[str, ...], list[list[Charge]]] = defaultdict(list)
    run: list[Charge] = []
    for kernel in kernels:
        run.append(kernel)
        if kernel.operator in _CUTS:
            same[tuple(k.name for k in run)].append(run)
            run = []
    if run:
        same[tuple(k.name for k in run)].append(run)
    found = [
        Section(len(runs), tuple(_mean(column) for column in zip(*runs, strict=True)))
        for runs in same.values()
    ]
    return sorted(found, key=lambda section: -section.count * section.us)


def _mean(kernels: tuple[Charge, ...]) -> Charge:
    count = len(kernels)
    us, gap = (sum(k.us for k in kernels) / count, sum(k.gap_us for k in kernels) / count)
    return Charge(kernels[0].name, kernels[0].operator, us, gap)


def profiled(step: Callable[[], object]) -> list[Charge]:
    """What the device runs in one call of `step`."""
    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    kineto = profiler.profiler
    assert kineto is not None
    events = [
        (event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
        for event in kineto.kineto_results.events()
        if event.device_type() == torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
    ]
    return charges(event for event in events if "Synchronize" not in event[0])
