# SPDX-License-Identifier: Apache-2.0
"""Router, experts in both layouts, SwiGLU, and the sharded ends of the vocabulary."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from glmserve.kernels.experts import experts
from glmserve.kernels.linear import linear
from glmserve.kernels.router import route
from glmserve.kernels.swiglu import swiglu
from glmserve.kernels.vocabulary import embed_shard, head_shard
from tests.kernels.shapes import Draw, Shape, all_dtypes, all_shapes, key
from tests.tolerances import assert_close

EXPERTS, TOP, INNER = 12, 3, 16


def naive_ffn(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (x.double() @ gate_up.double().T).chunk(2, -1)
    return (gate / (1 + (-gate).exp()) * up) @ down.double().T


@all_shapes
@all_dtypes
def test_linear_and_swiglu(shape: Shape, dtype: torch.dtype) -> None:
    draw = Draw()
    x = draw.normal(shape.rows, shape.hidden, dtype=dtype, scale=0.3)
    weight = draw.normal(2 * INNER, shape.hidden, dtype=dtype, scale=0.1)
    got = linear(x, weight)
    assert_close("linear", x.double() @ weight.double().T, got, key(dtype))
    gate, up = got.double().chunk(2, -1)
    assert_close("swiglu", gate / (1 + (-gate).exp()) * up, swiglu(got), key(dtype))


def test_router_bias_chooses_but_does_not_weigh() -> None:
    draw = Draw()
    x = draw.normal(9, 20, dtype=torch.float64)
    gate = draw.normal(EXPERTS, 20, dtype=torch.float64, scale=0.3)
    bias = 34.0 + draw.normal(EXPERTS, dtype=torch.float64, scale=0.08)
    ids, weights = route(x, gate, bias, TOP, 2.5)
    p = 1 / (1 + (-(x @ gate.T)).exp())
    for row in range(9):
        order = sorted(range(EXPERTS), key=lambda e: (-(p[row, e] + bias[e]).item(), e))
        assert ids[row].tolist() == sorted(order[:TOP])
        chosen = p[row, ids[row]]
        assert_close("weights", chosen / chosen.sum() * 2.5, weights[row], "operator_fp64")
    unbiased, _ = route(x, gate, torch.zeros_like(bias), TOP, 2.5)
    assert not torch.equal(ids, unbiased)


def test_router_ties_go_to_the_lower_expert() -> None:
    gate = torch.zeros(EXPERTS, 4)
    bias = torch.full((EXPERTS,), 34.0)
    bias[7] += 0.25
    ids, weights = route(torch.ones(2, 4), gate, bias, TOP, 2.5)
    assert ids.tolist() == [[0, 1, 7]] * 2
    assert_close("equal shares", torch.full((2, TOP), 2.5 / TOP), weights, "operator_fp32")


def test_router_of_bf16_rows_decides_in_fp32() -> None:
    """Biases a hundredth apart near 34 are one bf16 number; the choice must still see them."""
    gate = torch.zeros(EXPERTS, 4)
    bias = 34.0 + 0.01 * torch.arange(EXPERTS)
    ids, weights = route(torch.ones(1, 4, dtype=torch.bfloat16), gate, bias, TOP, 2.5)
    assert ids.tolist() == [[9, 10, 11]]
    assert weights.dtype == torch.float32


@all_shapes
@all_dtypes
@pytest.mark.parametrize("layout", ["ep", "sliced"])
def test_ranks_parts_of_the_experts_add_up(shape: Shape, dtype: torch.dtype, layout: str) -> None:
    draw, ranks = Draw(), 4
    hidden = shape.hidden
    x = draw.normal(shape.rows, hidden, dtype=dtype, scale=0.5)
    gate_up = draw.normal(EXPERTS, 2 * INNER, hidden, dtype=dtype, scale=hidden**-0.5)
    down = draw.normal(EXPERTS, hidden, INNER, dtype=dtype, scale=INNER**-0.5)
    ids = torch.stack([draw.permutation(EXPERTS)[:TOP].sort().values for _ in range(shape.rows)])
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    weights = draw.normal(shape.rows, TOP, dtype=wide).abs()
    shared = draw.normal(ranks, shape.rows, hidden, dtype=dtype)
    total = torch.zeros(shape.rows, hidden, dtype=torch.float64)
    for rank in range(ranks):
        if layout == "ep":
            held = slice(rank * EXPERTS // ranks, (rank + 1) * EXPERTS // ranks)
            part, first = (gate_up[held], down[held]), int(held.start)
        else:
            own = slice(rank * INNER // ranks, (rank + 1) * INNER // ranks)
            gate, up = gate_up.chunk(2, 1)
            part, first = (torch.cat((gate[:, own], up[:, own]), 1), down[:, :, own]), 0
        total += experts(x, ids, weights, *part, first, shared[rank]).double()
    want = shared.double().sum(0)
    for row in range(shape.rows):
        for expert, weight in zip(ids[row].tolist(), weights[row].tolist(), strict=True):
            want[row] += weight * naive_ffn(x[row], gate_up[expert], down[expert])
    # Each of the four bf16 parts is rounded on its own.
    assert_close("experts", want / ranks, total / ranks, key(dtype))


def test_experts_of_no_local_row_return_the_shared_part() -> None:
    x, shared = torch.ones(2, 4), torch.full((2, 4), 5.0)
    ids, weights = torch.tensor([[0, 1], [2, 3]]), torch.ones(2, 2)
    got = experts(x, ids, weights, torch.ones(4, 6, 4), torch.ones(4, 4, 3), 8, shared)
    assert torch.equal(got, shared)


def test_embedding_shards_add_up_exactly() -> None:
    draw = Draw()
    table = draw.normal(24, 5, dtype=torch.bfloat16)
    tokens = torch.tensor([0, 23, 5, 6, 11, 12, 6])
    total = sum(embed_shard(tokens, part, 6 * rank) for rank, part in enumerate(table.split(6)))
    assert isinstance(total, Tensor)
    assert torch.equal(total, table[tokens])


def test_head_shards_are_columns_and_stay_wide() -> None:
    draw = Draw()
    hidden, weight = (draw.normal(n, 16, dtype=torch.bfloat16) for n in (3, 8))
    parts = [head_shard(hidden, part) for part in weight.split(2)]
    assert parts[0].dtype == torch.float32
    assert_close(
        "logits", hidden.double() @ weight.double().T, torch.cat(parts, 1), "operator_fp32"
    )
