# SPDX-License-Identifier: Apache-2.0
"""The router's kernels: exact choices near biases of 34, ties, and bits alone and in a step."""

from __future__ import annotations

import pytest
import torch

from glmserve.kernels.experts.launch import sort_pairs
from glmserve.kernels.router import ChoiceCount, reference
from glmserve.kernels.router.launch import route, route_sorted
from tests.tolerances import assert_close

gates = pytest.mark.parametrize("gate_dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])


def make(rows: int, experts: int, depth: int, gate_dtype: torch.dtype) -> list[torch.Tensor]:
    gate = torch.randn(experts, depth) * depth**-0.5
    return [
        torch.randn(rows, depth).bfloat16(),
        gate.to(gate_dtype),
        34 + torch.randn(experts) * 0.1,
    ]


@gates
@pytest.mark.parametrize(
    ("rows", "experts", "depth"), [(1, 256, 256), (19, 40, 640), (70, 72, 192)]
)
def test_matches_the_reference(
    device: torch.device, rows: int, experts: int, depth: int, gate_dtype: torch.dtype
) -> None:
    x, gate, bias = make(rows, experts, depth, gate_dtype)
    ids, weights = reference.route(x.double(), gate.double(), bias.double(), 8, 2.5)
    got_ids, got = route(x.to(device), gate.to(device), bias.to(device), 8, 2.5)
    assert torch.equal(got_ids.cpu(), ids)
    assert_close("weights", weights, got, "operator_fp32")


@gates
def test_many_rows_give_the_bits_of_one(device: torch.device, gate_dtype: torch.dtype) -> None:
    x, gate, bias = (t.to(device) for t in make(260, 64, 256, gate_dtype))
    ids, weights = route(x, gate, bias, 4, 1.0)
    for row in (0, 259):
        one_ids, one = route(x[row : row + 1].contiguous(), gate, bias, 4, 1.0)
        assert torch.equal(one_ids, ids[row : row + 1])
        assert torch.equal(one, weights[row : row + 1])


def test_ties_go_to_the_lower_expert(device: torch.device) -> None:
    gate = torch.ones(48, 128)
    bias = torch.zeros(48)
    bias[40] = 0.5
    x = torch.randn(2, 128).bfloat16()
    ids, weights = route(x.to(device), gate.to(device), bias.to(device), 4, 1.0)
    assert ids.tolist() == [[0, 1, 2, 40]] * 2
    assert_close("equal shares", torch.full((2, 4), 0.25), weights, "operator_fp32")


def test_better_experts_come_before_equal_ones(device: torch.device) -> None:
    bias = torch.full((48,), 34.0)
    bias[40], bias[[3, 9, 11, 30]] = 35.0, 34.5
    gate = torch.randn(48, 128).bfloat16()
    ids, _ = route(
        torch.zeros(3, 128).bfloat16().to(device), gate.to(device), bias.to(device), 4, 1.0
    )
    assert ids.tolist() == [[3, 9, 11, 40]] * 3


def test_negative_scores_are_ordered(device: torch.device) -> None:
    bias = torch.linspace(-9, -2, 40)[torch.randperm(40)]
    x, gate = torch.zeros(1, 128).bfloat16(), torch.randn(40, 128)
    ids, _ = route(x.to(device), gate.to(device), bias.to(device), 8, 1.0)
    assert ids[0].tolist() == bias.topk(8).indices.sort().values.tolist()


@pytest.mark.parametrize("experts", [40, 64])
def test_choices_are_counted_without_padding(device: torch.device, experts: int) -> None:
    x, gate, bias = (t.to(device) for t in make(23, experts, 128, torch.bfloat16))
    row_seq = torch.randint(0, 5, (23,), device=device)
    row_seq[[2, 7, 22]] = 5
    totals = torch.arange(experts, device=device)
    ids, _ = route(x, gate, bias, 4, 1.0, ChoiceCount(totals, row_seq, 5))
    expected = torch.arange(experts) + torch.bincount(
        ids[row_seq != 5].flatten().cpu(), minlength=experts
    )
    assert torch.equal(totals.cpu(), expected)
    assert int(totals.sum()) == experts * (experts - 1) // 2 + 20 * 4
    again = torch.arange(experts, device=device)
    ChoiceCount(again, row_seq, 5).add(ids)
    assert torch.equal(again, totals)


@pytest.mark.parametrize(
    ("rows", "experts", "first", "local", "block_m"),
    [
        (1, 24, 0, 24, 16),
        (1, 90, 10, 70, 16),
        (5, 40, 8, 20, 16),
        (30, 16, 4, 3, 4),
        (9, 64, 60, 4, 16),
    ],
)
def test_the_chosen_pairs_come_sorted(
    device: torch.device, rows: int, experts: int, first: int, local: int, block_m: int
) -> None:
    inputs = [t.to(device) for t in make(rows, experts, 128, torch.bfloat16)]
    want_ids, want_weights = route(*inputs, 8, 2.5)
    for _ in range(2):
        ids, weights, got = route_sorted(*inputs, 8, 2.5, None, first, local, block_m)
        assert torch.equal(ids, want_ids)
        assert torch.equal(weights, want_weights)
        want = sort_pairs(ids, first, local, block_m)
        held, tiles = int(want.offsets[-1]), int(want.tile_count)
        assert torch.equal(got.order[:held], want.order[:held])
        assert torch.equal(got.place, want.place)
        assert torch.equal(got.offsets, want.offsets)
        assert torch.equal(got.tile_count, want.tile_count)
        assert torch.equal(got.tile_expert, want.tile_expert)
        assert torch.equal(got.tile_begin[:tiles], want.tile_begin[:tiles])
        assert torch.equal(got.tile_end[:tiles], want.tile_end[:tiles])
