# SPDX-License-Identifier: Apache-2.0
"""The sampler's kernels draw the reference's ids: any width, odd shapes, every limit, padding."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import torch
from torch import Tensor

from glmserve.kernels.sampling import SamplingRows, launch, reference
from glmserve.parallel.group import SingleGroup
from glmserve.runtime.sampler import Sampler


def settings(rows: int, device: torch.device, limits: bool = True) -> SamplingRows:
    """Tables of 2 rows lines as strided views; every drawing row has its own combination."""
    lines = 2 * rows
    generator = torch.Generator().manual_seed(rows)

    def pick(values: list[float], dtype: torch.dtype) -> Tensor:
        chosen = torch.randint(len(values), (lines,), generator=generator)
        return torch.tensor(values, dtype=dtype)[chosen]

    f, i = torch.float64, torch.int64
    off = not limits
    reals = torch.stack(
        [
            pick([0.0, 0.6, 1.0, 1.7], f),
            pick([1.0] if off else [1.0, 0.95, 0.6, 1e-9], f),
            pick([0.0] if off else [0.0, 0.0, 0.05, 1.0], f),
        ],
        dim=1,
    ).to(device)
    seeds = torch.randint(-(1 << 62), 1 << 62, (lines,), generator=generator)
    top_k = pick([0] if off else [0, 0, 1, 7, 50, 1 << 30], i)
    integers = torch.stack([top_k, seeds], dim=1).to(device)
    line = torch.randperm(lines, generator=generator)[:rows].to(device)
    positions = torch.randint(1 << 21, (rows,), generator=generator).to(device)
    return SamplingRows(
        reals[:, 0], reals[:, 1], integers[:, 0], reals[:, 2], integers[:, 1], line, positions
    )


def logits_of(rows: int, vocabulary: int, device: torch.device) -> Tensor:
    """Flat and peaked rows, ties, shut ids."""
    x = torch.randn(rows, vocabulary, device=device) * 2
    x[1::5] *= 6
    x[2::5] = x[2::5].round()
    x[3::5, ::3] = -torch.inf
    x[4::5] -= 1000.0
    x[9::10] = x[9::10].round() * 2.0**26  # noise drowns: ties
    x[0, vocabulary // 2] = x[0].max()
    x[8::20] = -torch.inf
    return x


def by_kernels(shards: list[Tensor], rows: SamplingRows, valid: int, limits: bool) -> Tensor:
    """As ranks would draw; exchanges take what each shard has."""
    count, width = shards[0].shape
    size = len(shards)
    places = [launch.Shard(r * width, width, valid) for r in range(size)]
    scratch = [launch.Scratch.make(count + 3, shards[0].device) for _ in shards]
    cuts: list[tuple[Tensor, Tensor] | None] = [None] * size
    if limits:
        # All shards walk through find_cuts together, a thread each, one at a time.
        gate, board = threading.Barrier(size), [torch.empty(0)] * size
        turn = threading.Lock()

        def work(rank: int) -> None:
            def gather(x: Tensor) -> Tensor:
                board[rank] = x
                turn.release()
                gate.wait()
                together = torch.stack(list(board))
                gate.wait()
                turn.acquire()
                return together

            with turn:
                cuts[rank] = launch.find_cuts(
                    shards[rank], rows, places[rank], scratch[rank], gather
                )

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    pairs = [
        launch.draw(shard, rows, place, cut, own, False)
        for shard, place, cut, own in zip(shards, places, cuts, scratch, strict=True)
    ]
    for own in scratch:  # ready for the next step
        fresh = launch.Scratch.make(count + 3, shards[0].device)
        for name in ("best", "arrived", "sums"):
            assert torch.equal(getattr(own, name), getattr(fresh, name)), name
    return launch.join(torch.stack(pairs))


def by_reference(logits: Tensor, rows: SamplingRows, valid: int, limits: bool = True) -> Tensor:
    cpu = SamplingRows(*(getattr(rows, name).cpu() for name in rows.__dataclass_fields__))
    sampler = Sampler(SingleGroup(), logits.shape[1], valid, torch.device("cpu"))
    return sampler.sample(logits.cpu(), cpu, limits)


@pytest.mark.parametrize(("width", "size"), [(61, 1), (600, 1), (301, 2), (34, 4)])
@pytest.mark.parametrize("limits", [False, True])
def test_ids_are_those_of_the_reference(
    device: torch.device, width: int, size: int, limits: bool
) -> None:
    rows = settings(13, device, limits)
    logits = logits_of(13, width * size, device)
    valid = width * size - 3
    shards = [part.contiguous() for part in logits.chunk(size, dim=1)]
    got = by_kernels(shards, rows, valid, limits)
    assert got.tolist() == by_reference(logits, rows, valid, limits).tolist()


@pytest.mark.parametrize("decode", [False, True])
def test_greedy_takes_the_first_of_the_largest(device: torch.device, decode: bool) -> None:
    logits = torch.randint(-3, 4, (9, 1500), device=device).float()
    logits[1] = -0.0
    logits[1, 7] = 0.0  # the same value
    logits[2] = -torch.inf
    logits[3, 1498:] = 9.0  # beyond the valid ids
    place, scratch = launch.Shard(3000, 1500, 4498), launch.Scratch.make(9, device)
    for _ in range(2):
        got = launch.greedy(logits, place, scratch, decode)
        got = got if decode else launch.join(got[None])
        want = 3000 + reference.first_argmax(logits[:, :1498])[1]
        assert got.tolist() == want.tolist()


def test_one_rank_decodes_in_the_same_kernel(device: torch.device) -> None:
    rows, logits = settings(6, device), logits_of(6, 700, device)
    place, scratch = launch.Shard(0, 700, 699), launch.Scratch.make(6, device)
    cuts = launch.find_cuts(logits, rows, place, scratch, lambda x: x[None])
    got = launch.draw(logits, rows, place, cuts, scratch, True)
    assert got.tolist() == by_reference(logits, rows, 699).tolist()


def test_no_noise_is_above_its_bound() -> None:
    """The kernel's shortcut passes over blocks whose bound is below the best; all 2^23 uniforms."""
    for part in torch.arange(1 << 23).split(1 << 20):
        rest = (0xFFFFFF - part * 2).to(torch.float32)
        slope = torch.tensor(0.6931472 * 2.0**-23)
        bound = torch.tensor((24 + 127) * 0.6931472 + 1e-4) - (
            rest.view(torch.int32).to(torch.float32) * slope
        )
        assert (bound >= reference.noise_of(part << 9)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("width", [19360, 154880])
@pytest.mark.parametrize("limits", [False, True])
def test_real_shapes_and_every_feature(device: torch.device, width: int, limits: bool) -> None:
    for count in (1, 6, 32, 192, 576):
        rows = settings(count, device, limits)
        logits = logits_of(count, width, device)
        got = by_kernels([logits], rows, width - 60, limits)
        # The reference's operations give the same bits on both; the host would take minutes.
        sampler = Sampler(SingleGroup(), width, width - 60, device)
        sampler._kernels.serve = lambda _: False  # type: ignore[method-assign]
        assert torch.equal(got, sampler.sample(logits, rows, limits)), count
    few = torch.arange(0, count, 24, device=device)
    rows = dataclasses.replace(rows, rows=rows.rows[few], positions=rows.positions[few])
    want = by_reference(logits[few], rows, width - 60, limits)
    assert torch.equal(got[few].cpu(), want)
    shards = [part.contiguous() for part in logits[few].chunk(8, dim=1)]
    assert torch.equal(by_kernels(shards, rows, width - 60, limits).cpu(), want)


@pytest.mark.gpu
def test_a_captured_step_draws_as_an_eager_one(device: torch.device) -> None:
    sampler = Sampler(SingleGroup(), 19360, 19300, device)
    sampler.prepare(36)
    rows, logits = settings(36, device), logits_of(36, 19360, device)
    for limits in (False, True):
        want = sampler.sample(logits, rows, limits).clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = sampler.sample(logits, rows, limits)
        for _ in range(3):
            got.zero_()
            graph.replay()
            assert torch.equal(got, want)


@pytest.mark.gpu
def test_every_uniform_has_the_same_noise_on_both(device: torch.device) -> None:
    import triton
    import triton.language as tl

    from glmserve.kernels.sampling import arithmetic

    @triton.jit
    def noise(words, out, BLOCK: tl.constexpr):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + i, arithmetic.noise_of(tl.load(words + i).to(tl.uint32)))

    words = torch.arange(1 << 23, device=device) << 9
    out = torch.empty(1 << 23, device=device)
    noise[(1 << 13,)](words, out, 1024, enable_fp_fusion=False)
    assert torch.equal(out.cpu(), reference.noise_of(words.cpu()))
