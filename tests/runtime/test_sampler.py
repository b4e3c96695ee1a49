# SPDX-License-Identifier: Apache-2.0
"""The sampler: its generator, its distribution, its thresholds, and any width giving the same."""

from __future__ import annotations

import dataclasses
import math
import threading

import pytest
import torch
from torch import Tensor

from glmserve.kernels.sampling import reference
from glmserve.messages import RowInit, Shaping
from glmserve.parallel.group import SingleGroup
from glmserve.runtime.logit_shaping import DrawingRows, LogitShaping
from glmserve.runtime.sampler import Sampler, SamplingRows

CPU = torch.device("cpu")


class ThreadGroup:
    """N ranks as threads: exchanges through a list, so that widths can be compared in-process."""

    def __init__(self, rank: int, size: int, board: list[Tensor], gate: threading.Barrier) -> None:
        self.rank, self.size, self._board, self._gate = rank, size, board, gate

    def all_gather(self, x: Tensor) -> Tensor:
        self._board[self.rank] = x
        self._gate.wait()
        result = torch.stack(list(self._board))
        self._gate.wait()
        return result

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.all_gather(x).sum(0)


def rows_of(
    count: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 5,
    first: int = 0,
    min_p: float = 0.0,
) -> SamplingRows:
    return SamplingRows(
        torch.full((count,), temperature),
        torch.full((count,), top_p, dtype=torch.float64),
        torch.full((count,), top_k),
        torch.full((count,), min_p),
        torch.full((count,), seed),
        torch.arange(count),
        torch.arange(first, first + count),
    )


def sample_alone(logits: Tensor, rows: SamplingRows, valid: int | None = None) -> Tensor:
    width = logits.shape[1]
    sampler = Sampler(SingleGroup(), width, valid or width, CPU)
    parts = []
    for part in torch.arange(len(logits)).split(5000):  # what fits the core's cache
        some = dataclasses.replace(rows, rows=rows.rows[part], positions=rows.positions[part])
        parts.append(sampler.sample(logits[part], some))
    return torch.cat(parts)


def test_philox_matches_the_published_vector() -> None:
    # Random123's known answer for philox4x32-10 with key and counter 0.
    zero = torch.zeros(1, dtype=torch.int64)
    words = [word.item() for word in reference.philox_4x32(zero, zero, zero, zero)]
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_log_and_masses_are_accurate_and_noise_is_finite() -> None:
    x = torch.cat([torch.linspace(1e-7, 20, 200_001), 1 - 2.0 ** -torch.arange(1.0, 25.0)])
    want = torch.log(x.double())
    assert ((reference.log(x) - want).abs() <= 2.4e-7 * want.abs().clamp(min=1e-30)).all()
    step = torch.arange(0, reference.STEPS, 17)
    mass = torch.exp(-step.double() / reference.GRID) * 2**reference.MASS_BITS
    assert ((reference.masses(step) - mass).abs() <= 0.51 + 3e-6 * mass).all()
    assert reference.masses(step).diff().max() <= 0
    words = torch.cat([torch.arange(2000), 2**32 - 1 - torch.arange(2000)])
    noise = reference.noise_of(words)
    assert torch.isfinite(noise).all() and noise.min() > -2.82 and noise.max() < 16.7


def test_ids_on_both_sides_of_a_group_of_four_have_the_noise_of_their_own() -> None:
    seeds, positions = torch.tensor([3, -5]), torch.tensor([7, 8])
    whole = reference.gumbel_noise(seeds, positions, 0, 40)
    for first, width in ((0, 7), (5, 9), (6, 2), (39, 1)):
        part = reference.gumbel_noise(seeds, positions, first, width)
        assert torch.equal(part, whole[:, first : first + width])
    assert len(set(whole.flatten().tolist())) == 80


def assert_chi_square(got: Tensor, want: Tensor) -> None:
    """Fails when counts this far from the expected ones have a probability below 1e-4."""
    cells = want > 0
    chi2 = (((got - want) ** 2)[cells] / want[cells]).sum().item()
    freedom = int(cells.sum()) - 1
    # Wilson-Hilferty: the cube root of chi2/f is nearly normal; 3.7 sigma is p = 1e-4.
    if freedom:
        z = ((chi2 / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
        assert z < 3.7, (chi2, freedom)


def exact(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float = 0.0
) -> Tensor:
    """The distribution by definition: sort, cut, renormalise."""
    probs = torch.softmax(logits.double() / temperature, 0)
    probs = torch.where(probs >= min_p * probs.max(), probs, 0.0)
    probs = probs / probs.sum()
    order = probs.argsort(descending=True, stable=True)
    if top_k:
        probs = torch.where(probs >= probs[order[top_k - 1]], probs, 0.0)
        probs = probs / probs.sum()
    if top_p < 1:
        before = probs[order].cumsum(0) - probs[order]
        probs[order[before >= top_p]] = 0.0
    return probs / probs.sum()


@pytest.mark.parametrize("draws", [20_000, pytest.param(200_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.6, 0, 1.0, 0.0),
        (1.3, 5, 1.0, 0.0),
        (1.0, 0, 0.8, 0.0),
        (0.9, 8, 0.7, 0.0),
        (1.0, 1, 1.0, 0.0),
        (1.0, 0, 1.0, 0.15),
        (1.2, 9, 0.85, 0.1),
    ],
)
def test_draws_follow_the_exact_distribution(
    temperature: float, top_k: int, top_p: float, min_p: float, draws: int
) -> None:
    logits = torch.randn(24, generator=torch.Generator().manual_seed(1)) * 1.5
    rows = rows_of(draws, temperature, top_p, top_k, min_p=min_p)
    got = torch.bincount(sample_alone(logits.expand(draws, -1), rows), minlength=24).double()
    want = exact(logits, temperature, top_k, top_p, min_p) * draws
    assert got[want == 0].sum() == 0
    assert_chi_square(got, want)


def test_ties_at_the_kth_value_are_kept() -> None:
    logits = torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0]]).expand(4000, -1)
    drawn = sample_alone(logits, rows_of(4000, temperature=5.0, top_k=2))
    assert set(drawn.tolist()) == {0, 1, 2, 3}


def test_greedy_takes_the_lower_id_of_a_tie_and_no_padding_id() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 9.0], [5.0, 5.0, 1.0, 9.0]])
    assert sample_alone(logits, rows_of(2, temperature=0.0), valid=3).tolist() == [1, 0]


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    logits = torch.randn(50, 64, generator=torch.Generator().manual_seed(2))
    rows = rows_of(50, first=100)
    together = sample_alone(logits, rows)
    alone = [sample_alone(logits[i : i + 1], rows_of(1, first=100 + i)).item() for i in range(50)]
    assert together.tolist() == alone
    assert sample_alone(logits, rows_of(50, seed=6, first=100)).tolist() != alone


def test_a_row_has_limits_until_its_next_sequence() -> None:
    sampler = Sampler(SingleGroup(), 8, 8, CPU)
    for top_p, top_k, min_p in ((0.9, 0, 0.0), (1.0, 3, 0.0), (1.0, 0, 0.1)):
        sampler.admit(RowInit(2, 0, 1.0, top_p, top_k, 5, (), min_p=min_p))
        assert sampler.limited([0, 2]) and not sampler.limited([0, 1])
        sampler.admit(RowInit(2, 0, 0.0, top_p, top_k, 5, (), min_p=min_p))  # greedy
        assert not sampler.limited([2])


@pytest.mark.parametrize("size", [2, 4, 8])
def test_every_width_draws_the_same_tokens(size: int) -> None:
    count, vocab = 40, 64
    logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(3)) * 2
    rows = SamplingRows(
        torch.tensor([0.0, 0.7, 1.0, 1.5]).repeat(10),
        torch.tensor([1.0, 0.9, 0.5, 0.95, 0.8], dtype=torch.float64).repeat(8),
        torch.tensor([0, 3, 0, 10, 50, 1, 0, 7]).repeat(5),
        torch.tensor([0.0, 0.1]).repeat(20),
        torch.arange(count) * 7919 - 20,
        torch.arange(count),
        torch.arange(count),
    )
    want = sample_alone(logits, rows, valid=60).tolist()
    board, gate = [torch.empty(0)] * size, threading.Barrier(size)
    got: list[list[int]] = [[] for _ in range(size)]

    def work(rank: int) -> None:
        width = vocab // size
        sampler = Sampler(ThreadGroup(rank, size, board, gate), width, 60, CPU)  # type: ignore[arg-type]
        got[rank] = sampler.sample(logits[:, rank * width : (rank + 1) * width], rows).tolist()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert got == [want] * size


@pytest.mark.parametrize("size", [1, 4])
def test_logprobs_are_those_of_the_whole_vocabulary(size: int) -> None:
    logits = torch.randn(6, 32, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    logits[0, 7] = logits[0, 20]  # a tie: the lower id first
    tokens = torch.tensor([0, 7, 31, 3, 16, 20])
    want = torch.log_softmax(logits[:, :30], 1)
    want = torch.cat([want, torch.full((6, 2), -torch.inf, dtype=torch.float64)], 1)
    order = want.sort(dim=1, descending=True, stable=True).indices[:, :5]
    board, gate = [torch.empty(0)] * size, threading.Barrier(size)
    results: list[tuple[Tensor, Tensor, Tensor] | None] = [None] * size

    def work(rank: int) -> None:
        width = 32 // size
        sampler = Sampler(ThreadGroup(rank, size, board, gate), width, 30, CPU)  # type: ignore[arg-type]
        shard = logits[:, rank * width : (rank + 1) * width]
        results[rank] = sampler.logprobs(shard, tokens, 5)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for result in results:
        assert result is not None
        own, ids, values = result
        assert torch.allclose(own[tokens < 30], want.gather(1, tokens[:, None])[:, 0][tokens < 30])
        assert own[2] == -torch.inf  # an id that no token has
        assert ids.tolist() == order.tolist()
        assert torch.allclose(values, want.gather(1, order))


@pytest.mark.slow
@pytest.mark.parametrize("penalised", [False, True])
def test_verified_drafts_follow_the_exact_distribution(penalised: bool) -> None:
    """Tokens after an accepted draft, and those in place of a rejected one, over 200k draws."""
    draws, vocab = 200_000, 12
    generator = torch.Generator().manual_seed(11)
    first, second = torch.randn(2, vocab, generator=generator) * 1.2
    shaping = LogitShaping(1, 0, vocab, CPU)
    settings = Shaping(
        presence_penalty=0.6 if penalised else 0.0,
        frequency_penalty=0.3 if penalised else 0.0,
        repetition_penalty=1.3 if penalised else 1.0,
        logit_bias=(),
        allowed_token_ids=None,
        bad_word_ids=(),
        prompt=torch.tensor([2, 4], dtype=torch.int32).numpy(),
        output=torch.tensor([5], dtype=torch.int32).numpy(),
    )
    shaping.admit(RowInit(0, 0, 1.0, 1.0, 0, 9, (), shaping=settings))

    def shaped(logits: Tensor, ahead: list[int]) -> Tensor:
        rows = DrawingRows(
            torch.zeros(1, dtype=torch.int64), torch.tensor([9]), torch.tensor([ahead])
        )
        none = torch.full((2, 1), -1)
        return shaping.shape(logits[None], rows, none, torch.zeros(2, dtype=torch.int64))[0]

    one = shaped(first, [-1])
    draft = int(one.argmax())
    two = shaped(second, [draft])
    logits = torch.stack([one, two]).repeat(draws, 1)  # two drawing rows a sequence
    rows = rows_of(2 * draws, 0.9, 0.9, 8, seed=3)
    tokens = sample_alone(logits, rows).view(draws, 2)
    accepted = tokens[:, 0] == draft
    assert 0.02 < accepted.double().mean() < 0.9
    for got, source in ((tokens[:, 0], one), (tokens[accepted, 1], two)):
        counts = torch.bincount(got, minlength=vocab).double()
        want = exact(source, 0.9, 8, 0.9) * len(got)
        assert counts[want == 0].sum() == 0
        assert_chi_square(counts, want)
