# SPDX-License-Identifier: Apache-2.0
"""Top-k kernels against the stable sort of the reference: lengths, ties, hidden places, paths."""

from __future__ import annotations

import pytest
import torch

from glmserve.kernels.topk_select import reference
from glmserve.kernels.topk_select.launch import LONGEST, MIDDLE, SHORT, topk_select


def check(logits: torch.Tensor, k: int, last: torch.Tensor | None = None, first: int = 0) -> None:
    seen = logits.clone()
    if last is not None:
        place = torch.arange(logits.shape[1], device=logits.device)
        seen[(place > last[:, None]) | (place < first)] = -torch.inf
    want = reference.topk_select(seen, k)
    got = topk_select(logits, k, last, first)
    assert got.dtype == torch.int32
    assert torch.equal(got, want)


@pytest.mark.parametrize("width", [1, 63, 2047, 2048, 2049, 5000, SHORT])
def test_short_rows_of_any_length(device: torch.device, width: int) -> None:
    check(torch.randn(2, width, device=device), 2048)


def test_rows_end_where_last_says(device: torch.device) -> None:
    logits = torch.randn(4, 6000, device=device)
    check(logits, 2048, torch.tensor([0, 2047, 2048, 5999], device=device), first=1)


def test_ties_go_to_the_lower_position(device: torch.device) -> None:
    logits = torch.randint(-3, 4, (3, 6000), device=device).float()
    logits[1] = 0.0
    logits[2, ::2] = -0.0  # equal to 0
    check(logits, 2048)


def test_hidden_places_are_never_selected(device: torch.device) -> None:
    logits = torch.randn(2, 4000, device=device)
    logits[0, 100:3000] = -torch.inf
    logits[1] = -torch.inf
    check(logits, 2048)


def test_extreme_scores(device: torch.device) -> None:
    logits = torch.randn(2, 3000, device=device) * 1e-38
    logits[0, ::5] = 3e38
    logits[1, ::5] = -3e38
    check(logits, 300)


def test_infinite_scores_are_the_best(device: torch.device) -> None:
    logits = torch.randn(3, 6000, device=device)
    logits[0, ::7] = torch.inf
    logits[1, 4000] = torch.inf
    logits[2] = torch.inf
    check(logits, 300)


def test_k_of_more_than_are_there(device: torch.device) -> None:
    check(torch.randn(2, 3000, device=device), 5000, torch.tensor([2999, 40], device=device))


@pytest.mark.parametrize("width", [SHORT + 1, 2 * SHORT + 1])
def test_long_rows_with_short_and_long_contents(device: torch.device, width: int) -> None:
    logits = torch.randn(4, width, device=device)
    logits[3] = logits[3].sort().values
    check(logits, 2048, torch.tensor([5, 3000, width - 1, width - 1], device=device))


def test_long_rows_of_ties(device: torch.device) -> None:
    logits = torch.zeros(3, 20000, device=device)
    logits[1, 9000:11000] = 1.0
    logits[2] = -torch.inf
    logits[2, 12345] = 2.0
    check(logits, 2048)


def test_rows_of_an_odd_width(device: torch.device) -> None:
    logits = torch.randn(3, SHORT + 17, device=device)
    check(logits, 64, torch.tensor([SHORT + 16, SHORT - 1, 70], device=device), first=1)


FORMS = [1024, 8256, SHORT, 20032, 50016, 4 * SHORT + 64, MIDDLE, MIDDLE + 64, 1 << 20, LONGEST]


@pytest.mark.gpu
@pytest.mark.parametrize("width", FORMS)
def test_every_form_on_rows_of_every_length(device: torch.device, width: int) -> None:
    ends = torch.tensor([0, 1, 2047, 2048, 2049, 4096, 8192, 16384, width // 3, width - 1])
    check(torch.randn(10, width, device=device), 2048, ends.clamp_max(width - 1).to(device), 1)
    check(torch.randn(70 if width > MIDDLE else 300, width, device=device), 2048)


@pytest.mark.gpu
@pytest.mark.parametrize("width", FORMS)
def test_every_form_on_scores_that_crowd_in_one_bin(device: torch.device, width: int) -> None:
    logits = torch.randn(9, width, device=device)
    logits[0, width // 3] = 1e6  # stretches the bins
    logits[1] = 100 + 1e-4 * logits[1]
    logits[2] *= torch.exp(2 * torch.randn(width, device=device))
    logits[3] = 0.0
    logits[4].clamp_(min=0.0)
    logits[5, -4000:] += 4
    logits[6] = (logits[6] * 2).round()
    logits[7] = logits[7].sort().values
    logits[8] = -logits[7]
    check(logits, 2048)
    if width <= MIDDLE + 64:
        check(logits.repeat(8, 1), 2048)  # fewer CTAs a row


@pytest.mark.gpu
def test_rows_longer_than_every_cluster(device: torch.device) -> None:
    check(torch.randn(2, LONGEST + 64, device=device), 2048)


@pytest.mark.gpu
@pytest.mark.parametrize("width", FORMS)
def test_every_form_on_infinite_and_missing_scores(device: torch.device, width: int) -> None:
    logits = torch.randn(8, width, device=device)
    logits[0, 5::97] = torch.inf
    logits[1, width // 2] = torch.inf  # seldom in a sample
    logits[2] = torch.inf
    logits[3, ::3] = torch.inf
    logits[3, 1::3] = -torch.inf
    logits[4, width // 3 :] = -torch.inf
    logits[5] = -torch.inf
    logits[6, 700:] = -torch.inf  # fewer than k are left
    logits[7] = torch.where(torch.arange(width, device=device) % 2 == 0, 3.4e38, -3.4e38)
    check(logits, 2048)
    check(logits, 1, torch.full((8,), width - 1, device=device), first=1)
    check(logits, 8192)
    if width <= MIDDLE + 64:
        check(logits.repeat(8, 1), 2048)


@pytest.mark.gpu
@pytest.mark.parametrize("width", FORMS)
def test_a_row_is_selected_alone_as_among_others(device: torch.device, width: int) -> None:
    logits = torch.randn(70, width, device=device)
    last = torch.randint(0, width, (70,), device=device)
    together = topk_select(logits, 2048, last, 0)
    for row in (0, 17, 69):
        alone = topk_select(logits[row : row + 1].clone(), 2048, last[row : row + 1].clone(), 0)
        assert torch.equal(alone[0], together[row])


@pytest.mark.gpu
@pytest.mark.parametrize("width", [8256, 102400, 1 << 20])
def test_captured_launches_follow_their_input(device: torch.device, width: int) -> None:
    logits = torch.randn(24, width, device=device)
    last = torch.full((24,), width - 1, device=device)
    topk_select(logits, 2048, last, 0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(5):  # each starts while the one before it ends
            out = topk_select(logits, 2048, last, 0)
    for _ in range(20):
        logits.normal_()
        out.fill_(-7)
        graph.replay()
        assert torch.equal(out, reference.topk_select(logits, 2048))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "width"), [(192, 102400), (48, 102400), (40, 1 << 18), (24, 1 << 20)]
)
def test_clusters_crowd_the_card_for_thousands_of_launches(
    device: torch.device, rows: int, width: int
) -> None:
    """A cluster that meets too lightly reads what has not arrived, or an ended CTA's memory."""
    logits = torch.randn(rows, width, device=device).relu_()
    last = torch.full((rows,), width - 1, device=device)
    want = topk_select(logits, 2048, last, 0)
    assert torch.equal(want[:4], reference.topk_select(logits[:4], 2048))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [topk_select(logits, 2048, last, 0) for _ in range(20)]
    for _ in range(20):
        for _ in range(20):
            graph.replay()
        assert all(torch.equal(out, want) for out in outs)
