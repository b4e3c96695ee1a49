# SPDX-License-Identifier: Apache-2.0
"""Every kind of group does the same: sums in rank order, the same bits on every rank."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from glmserve import env
from glmserve.config import EngineConfig, cuda_devices
from glmserve.errors import EngineError
from glmserve.parallel.launcher import RankLauncher
from tests.ipc.processes import environment_of, gone, mappings_of, wait_until
from tests.parallel.group_program import digest, rank_input

# It takes 0.2 s; a busy machine must not fail the test, and a wait that hung would last 60 s.
SOON = 30.0
PROGRAM = Path(__file__).with_name("group_program.py")
NCCL = [pytest.mark.gpu, pytest.mark.skipif(cuda_devices() < 2, reason="needs two GPUs")]
KINDS = [
    pytest.param(("shm", 1), id="single"),
    pytest.param(("shm", 2), id="shm-2"),
    pytest.param(("shm", 8), id="shm-8"),
    pytest.param(("gloo", 2), id="gloo-2"),
    pytest.param(("gloo", 8), id="gloo-8", marks=pytest.mark.slow),
    pytest.param(("nccl", 2), id="nccl-2", marks=NCCL),
]
SHAPES = {
    "scalar": [],
    "one": [1],
    "odd": [3, 5, 7],
    "empty": [0, 4],
    "fewer elements than ranks": [5],
    "below the one-shot limit": [1023],
    "above the one-shot limit": [16411],
    "above a slot, in both kinds of chunk": [3, 44_001],
}
SUMMED = ("bfloat16", "float32", "float64", "int32", "int64")


class Ranks:
    """Running ranks of one kind of group."""

    def __init__(self, collectives: str, size: int) -> None:
        self.collectives = collectives
        self.size = size
        config = EngineConfig(
            checkpoint="none",
            ranks=size,
            device="cuda" if collectives == "nccl" else "cpu",
            collectives=collectives,  # type: ignore[arg-type]
        )
        self.launcher = RankLauncher(config, program=(str(PROGRAM),), collective_timeout=60)

    def run(self, plans: list[dict[str, Any]]) -> list[list[str]]:
        """Returns, for each plan, the digests of all ranks' results."""
        self.launcher.send(json.dumps(plans).encode(), 60)
        by_rank = json.loads(self.launcher.recv(120))
        return [list(row) for row in zip(*by_rank, strict=True)]

    def inputs(self, shape: list[int], dtype: str) -> list[Tensor]:
        return [rank_input(rank, shape, dtype) for rank in range(self.size)]


@pytest.fixture(scope="module", params=KINDS)
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    started = Ranks(*request.param)
    yield started
    started.launcher.close()


def rank_order_sum(parts: list[Tensor]) -> Tensor:
    dtype = parts[0].dtype
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(dtype)


@pytest.mark.parametrize("dtype", SUMMED)
def test_all_reduce_is_the_rank_order_sum_bit_for_bit(ranks: Ranks, dtype: str) -> None:
    plans = [{"do": "all_reduce", "shape": s, "dtype": dtype} for s in SHAPES.values()]
    for (name, shape), got in zip(SHAPES.items(), ranks.run(plans), strict=True):
        expected = digest(rank_order_sum(ranks.inputs(shape, dtype)))
        assert got == [expected] * ranks.size, name


def test_another_order_would_be_seen() -> None:
    parts = [rank_input(rank, [1023], "float32") for rank in range(8)]
    assert digest(rank_order_sum(parts)) != digest(rank_order_sum(parts[::-1]))


def test_all_reduce_does_not_depend_on_who_comes_first(ranks: Ranks) -> None:
    plans = [
        {"do": "all_reduce", "shape": [100], "dtype": "float32", "stagger": i} for i in range(1, 8)
    ]
    expected = digest(rank_order_sum(ranks.inputs([100], "float32")))
    assert ranks.run(plans) == [[expected] * ranks.size] * 7


def test_a_strided_input_is_summed_by_its_elements(ranks: Ranks) -> None:
    plan = {"do": "all_reduce", "shape": [6, 33], "dtype": "float64", "transposed": True}
    expected = digest(rank_order_sum([x.t() for x in ranks.inputs([6, 33], "float64")]))
    assert ranks.run([plan]) == [[expected] * ranks.size]


@pytest.mark.parametrize("dtype", [*SUMMED, "uint8"])
def test_all_gather_stacks_in_rank_order(ranks: Ranks, dtype: str) -> None:
    plans = [{"do": "all_gather", "shape": s, "dtype": dtype} for s in SHAPES.values()]
    for (name, shape), got in zip(SHAPES.items(), ranks.run(plans), strict=True):
        expected = digest(torch.stack(ranks.inputs(shape, dtype)))
        assert got == [expected] * ranks.size, name


def test_broadcast_gives_everyone_the_source(ranks: Ranks) -> None:
    sources = sorted({0, ranks.size - 1})
    plans = [
        {"do": "broadcast", "shape": s, "dtype": "bfloat16", "src": src}
        for src in sources
        for s in SHAPES.values()
    ]
    results = iter(ranks.run(plans))
    for src in sources:
        for name, shape in SHAPES.items():
            expected = digest(rank_input(src, shape, "bfloat16"))
            assert next(results) == [expected] * ranks.size, name


def test_every_rank_runs_without_multicast(ranks: Ranks) -> None:
    for pid in ranks.launcher.pids:
        environment = environment_of(pid)
        for name, value in env.REQUIRED_CHILD_ENV.items():
            assert environment[name] == value
        assert environment["OMP_NUM_THREADS"] == "1"


def test_ranks_share_memory_that_has_no_name(ranks: Ranks) -> None:
    for pid in ranks.launcher.pids:
        mapped = mappings_of(pid)
        assert "/memfd:glmserve-plans (deleted)" in mapped
        if ranks.size > 1 and ranks.collectives == "shm":
            assert "/memfd:glmserve-group (deleted)" in mapped
        assert not [name for name in mapped if name.startswith("/dev/shm")]


def test_killing_the_last_rank_ends_everybodys_waits(ranks: Ranks) -> None:  # last: it ends them
    launcher, last = ranks.launcher, ranks.size - 1
    launcher.send(json.dumps([{"do": "block", "shape": [9], "dtype": "float32"}]).encode())
    with pytest.raises(TimeoutError):
        launcher.recv(0.3)
    launcher.children[last].signal(signal.SIGKILL)
    with pytest.raises(EngineError, match=rf"^rank {last} died \(signal 9\)$"):
        launcher.recv(SOON)
    wait_until(lambda: all(map(gone, launcher.pids)), SOON, "every rank has ended")
    assert launcher.failure == f"rank {last} died (signal 9)"
    with pytest.raises(EngineError, match=f"rank {last}"):
        launcher.send(b"more")
