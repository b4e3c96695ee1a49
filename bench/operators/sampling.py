# SPDX-License-Identifier: Apache-2.0
"""The sampler over a shard of the vocabulary, and what shapes logits before it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch

from bench.registry import Case, Problem, memory_us
from glmserve.kernels.logit_shaping import ShapingTables
from glmserve.kernels.logit_shaping import launch as shaping_launch
from glmserve.kernels.logit_shaping import reference as shaping_reference
from glmserve.kernels.sampling import SamplingRows, launch, reference

SHARD, VALID = 19360, 19300
DRAFTS = 5


def row_settings(rows: int, device: torch.device | str, limits: bool, greedy: bool) -> SamplingRows:
    reals = torch.ones(rows + 1, 3, dtype=torch.float64, device=device)
    integers = torch.zeros(rows + 1, 64, dtype=torch.int64, device=device)
    reals[:, 2] = 0
    if greedy:
        reals[:, 0] = 0
    if limits:
        reals[:, 1] = 0.95
        integers[::2, 0] = 50
    integers[:, 1] = 7919 * torch.arange(rows + 1, device=device)
    line = torch.arange(rows, device=device)
    return SamplingRows(
        reals[:, 0], reals[:, 1], integers[:, 0], reals[:, 2], integers[:, 1], line, line + 9
    )


def random_logits(rows: int, device: torch.device | str = "cuda") -> torch.Tensor:
    """A normal body, and a few ids well above it."""
    x = torch.randn(rows, SHARD, device=device) * 2
    x[:, ::997] += 9
    return x


def _shaping(rows: int, device: torch.device | str) -> tuple[ShapingTables, list[torch.Tensor]]:
    tables = ShapingTables.make(rows + 1, SHARD, torch.device(device))
    line = torch.arange(rows, device=device)
    ahead = torch.full((rows, DRAFTS), -1, dtype=torch.int64, device=device)
    stops = torch.full((rows + 1, 48), -1, dtype=torch.int64, device=device)
    return tables, [line, line + 9, ahead, stops[:, :32], stops[:, 40]]


def launches(device: torch.device) -> Iterator[tuple[str, Callable[[], object]]]:
    shard, scratch = launch.Shard(0, SHARD, VALID), launch.Scratch.make(6, device)
    logits, rows = torch.empty(6, SHARD, device=device), row_settings(6, device, True, False)
    yield "greedy", lambda: launch.greedy(logits, shard, scratch, True)
    yield "plain", lambda: launch.draw(logits, rows, shard, None, scratch, True)

    def limited() -> object:
        cuts = launch.find_cuts(logits, rows, shard, scratch, lambda x: x[None])
        return launch.draw(logits, rows, shard, cuts, scratch, True)

    yield "limited", limited
    pairs = torch.empty(8, 6, dtype=torch.int64, device=device)
    yield "join", lambda: launch.join(pairs)
    tables, inputs = _shaping(6, device)
    yield "shape", lambda: shaping_launch.shape(logits, tables, 0, *inputs)
    results = torch.empty(6, 16, dtype=torch.int32, device=device)
    yield (
        "confirm",
        lambda: shaping_launch.confirm(tables, 0, inputs[0], results[:, 4:10], results[:, 0]),
    )
    bits = torch.empty(6, SHARD // 32, dtype=torch.int32, device=device)
    yield "shut", lambda: shaping_launch.shut_ids(logits, bits[:, 0].contiguous(), bits, 0, 0)


def _expected(logits: torch.Tensor, rows: SamplingRows, limits: bool) -> torch.Tensor:
    """The reference's ids, on the host."""
    from glmserve.parallel.group import SingleGroup
    from glmserve.runtime.sampler import Sampler

    host = SamplingRows(*(getattr(rows, f.name).cpu() for f in dataclasses.fields(rows)))
    sampler = Sampler(SingleGroup(), SHARD, VALID, torch.device("cpu"))
    return sampler.sample(logits.cpu(), host, limits)


def sampling_problem(rows: int, kind: str) -> Problem:
    torch.manual_seed(0)
    sets = max(2, min(100, 200_000_000 // (rows * SHARD * 4)))
    inputs = [random_logits(rows) for _ in range(sets)]
    shard = launch.Shard(0, SHARD, VALID)
    scratch = launch.Scratch.make(rows, inputs[0].device)
    settings = row_settings(rows, "cuda", kind == "limits", kind == "greedy rows")
    outs: dict[int, torch.Tensor] = {}

    def run(i: int) -> None:
        if kind == "greedy":
            outs[i] = launch.greedy(inputs[i], shard, scratch, True)
            return
        cuts = None
        if kind == "limits":
            cuts = launch.find_cuts(inputs[i], settings, shard, scratch, lambda x: x[None])
        outs[i] = launch.draw(inputs[i], settings, shard, cuts, scratch, True)

    if kind == "greedy":
        want = reference.first_argmax(inputs[0][:, :VALID])[1].cpu()
    else:
        want = _expected(inputs[0], settings, kind == "limits")
    return Problem(run, sets, lambda: 0.0, exact=lambda: torch.equal(outs[0].cpu(), want))


def shaping_problem(rows: int) -> Problem:
    torch.manual_seed(0)
    sets = max(2, min(100, 200_000_000 // (rows * SHARD * 8)))
    inputs = [random_logits(rows) for _ in range(sets)]
    tables, where = _shaping(rows, "cuda")
    tables.flags.fill_(7)
    tables.allowed.fill_(-2)
    tables.in_prompt.random_()
    tables.penalties.copy_(torch.tensor([0.4, 0.2, 1.2]))
    tables.words[:, 5, -2:] = 3
    tables.recent[:, -1] = 3
    host = ShapingTables(*(getattr(tables, f.name).cpu() for f in dataclasses.fields(tables)))
    want = shaping_reference.shape(inputs[0].cpu(), host, 0, *(x.cpu() for x in where))
    outs: dict[int, torch.Tensor] = {}

    def run(i: int) -> None:
        outs[i] = shaping_launch.shape(inputs[i], tables, 0, *where)

    return Problem(run, sets, lambda: 0.0, exact=lambda: torch.equal(outs[0].cpu(), want))


def cases() -> Iterator[Case]:
    for kind in ("greedy", "plain", "limits"):
        for rows in (1, 6, 32, 192):
            passes = 5 if kind == "limits" else 1
            target = None if kind == "limits" else (12.0 if rows == 192 else 3.0)
            yield Case(
                "sampling",
                f"{rows} rows x {SHARD}, {kind}",
                lambda rows=rows, kind=kind: sampling_problem(rows, kind),
                memory_us(passes * rows * SHARD * 4),
                0.0,
                target_us=target,
            )
    for rows in (6, 192):
        yield Case(
            "logit_shaping",
            f"{rows} rows x {SHARD}, every setting",
            lambda rows=rows: shaping_problem(rows),
            memory_us(rows * SHARD * (4 + 4 + 4 + 4 + 0.25)),
            0.0,
        )
