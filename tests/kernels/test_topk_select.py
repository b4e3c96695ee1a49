# SPDX-License-Identifier: Apache-2.0
"""Top-k kernels against the stable sort of the reference: lengths, ties, hidden places, paths."""

from __future__ import annotations

import pytest
import torch

from glmserve.kernels.topk_select import launch, reference
from glmserve.kernels.topk_select.launch import SHORT, topk_select


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


@pytest.fixture(params=[132, 0], ids=["programs meet", "four launches"])
def forms(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_multiprocessors", lambda device: request.param)


@pytest.mark.parametrize("width", [2 * SHORT + 1, 3 * SHORT + 1])
@pytest.mark.usefixtures("forms")
def test_long_rows_with_short_and_long_contents(device: torch.device, width: int) -> None:
    logits = torch.randn(4, width, device=device)
    logits[3] = logits[3].sort().values
    check(logits, 2048, torch.tensor([5, 3000, width - 1, width - 1], device=device))


@pytest.mark.usefixtures("forms")
def test_long_rows_where_the_sample_misleads(device: torch.device) -> None:
    logits = torch.zeros(3, 20000, device=device)  # more ties than one CTA holds
    logits[1, 9000:11000] = 1.0
    logits[2] = -torch.inf
    logits[2, 12345] = 2.0
    check(logits, 2048)


def test_rows_of_two_programs_and_the_counts_they_leave(device: torch.device) -> None:
    logits = torch.randn(3, SHORT + 1, device=device)
    last = torch.tensor([SHORT, SHORT - 1, 70], device=device)
    for _ in range(2):  # counts are zero again
        check(logits, 64, last, first=1)


@pytest.mark.gpu
def test_more_programs_meet_than_run_at_once(device: torch.device) -> None:
    check(torch.randn(300, SHORT + 2000, device=device), 2048)
