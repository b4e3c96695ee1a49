# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of steps: one a shape and sampling variant, made before serving starts.

A graph holds the whole step: target forward, draws, verification, all draft passes. Steps with a
grammar or with log-probabilities need the host between the logits and the draws: for them the
step also exists in two graphs, and the second one does all that sampling can.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from glmserve.runtime.packing import Layout, Shape
from glmserve.runtime.variants import ALL_VARIANTS, EVERYTHING, Variant

Forward = Callable[[Layout], tuple[Tensor, Tensor]]
Finish = Callable[[Layout, Tensor, Tensor, Variant], tuple[Tensor, Tensor | None]]
Send = Callable[[Tensor], None]


@dataclass(frozen=True)
class Step:
    """A captured step, or the second half of one, and where it leaves the draws."""

    graph: torch.cuda.CUDAGraph
    draws: Tensor  # [M] int64
    sequences: int  # whose results it sends


@dataclass(frozen=True)
class Head:
    """The first half of a step."""

    graph: torch.cuda.CUDAGraph
    hidden: Tensor
    logits: Tensor  # [M, V/N], may be changed in place before the second half


@dataclass(frozen=True)
class Captured:
    """A shape's graphs, and the layout that they read."""

    layout: Layout
    whole: dict[Variant, Step]
    head: Head
    tail: Step


@dataclass
class Graphs:
    """Made by `capture`; shapes share one memory pool, because only one replays at a time."""

    shapes: dict[Shape, Captured] = field(default_factory=dict)
    bytes: int = 0

    def decode_shape(self, sequences: int) -> Shape | None:
        """The smallest decode step with room for so many sequences."""
        return self._smallest(lambda shape: not shape.mixed and shape.sequences >= sequences)

    def mixed_shape(self, rows: int) -> Shape | None:
        """The smallest mixed step with room for so many rows."""
        return self._smallest(lambda shape: shape.mixed and shape.rows >= rows)

    def _smallest(self, fits: Callable[[Shape], bool]) -> Shape | None:
        return min(filter(fits, self.shapes), key=lambda shape: shape.rows, default=None)

    def capture(
        self,
        layouts: Mapping[Shape, Layout],
        forward: Forward,
        finish: Finish,
        send: Send,
        progress: Callable[[str], None],
    ) -> None:
        """Captures every shape's step; each ends by sending its results.

        Each one is run first, which compiles its kernels. Largest first: the smaller ones then
        fit into the memory that it took.
        """
        for layout in layouts.values():
            for variant in ALL_VARIANTS:
                _, results = finish(layout, *forward(layout), variant)
                assert results is not None
                send(results)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        held = torch.cuda.memory_reserved()
        started = time.monotonic()
        pool = torch.cuda.graph_pool_handle()
        for shape in sorted(layouts, key=lambda shape: -shape.rows):
            self.shapes[shape] = _capture(layouts[shape], forward, finish, send, pool)
            progress(
                f"captured {'mixed' if shape.mixed else 'decode'} steps of {shape.rows} rows:"
                f" {len(self.shapes)} of {len(layouts)} shapes, {time.monotonic() - started:.1f} s"
            )
        torch.cuda.synchronize()
        # Of this process: the card's free memory also tells what its neighbours do.
        self.bytes = torch.cuda.memory_reserved() - held
        progress(f"graphs take {self.bytes / 2**20:.0f} MiB")


def _capture(layout: Layout, forward: Forward, finish: Finish, send: Send, pool: Any) -> Captured:
    def ended(hidden: Tensor, logits: Tensor, variant: Variant) -> tuple[Tensor, int]:
        draws, results = finish(layout, hidden, logits, variant)
        assert results is not None
        send(results)
        return draws, len(results)

    whole = {}
    for variant in ALL_VARIANTS:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            found = ended(*forward(layout), variant)
        whole[variant] = Step(graph, *found)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        hidden, logits = forward(layout)
    head = Head(graph, hidden, logits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        found = ended(hidden, logits, EVERYTHING)
    return Captured(layout, whole, head, Step(graph, *found))
