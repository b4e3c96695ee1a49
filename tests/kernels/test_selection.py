# SPDX-License-Identifier: Apache-2.0
"""Index logits, top-k with ties, slot lookup and sparse attention over permuted pages."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from glmserve.kernels.index_logits import index_logits
from glmserve.kernels.index_logits import reference as index_reference
from glmserve.kernels.slot_lookup import slot_lookup
from glmserve.kernels.sparse_mla import reference as mla_reference
from glmserve.kernels.sparse_mla import sparse_mla
from glmserve.kernels.topk_select import topk_select
from glmserve.kernels.value_up import value_up
from tests.kernels.shapes import Draw, Shape, all_dtypes, all_shapes, key
from tests.tolerances import assert_close

PAGE = 8
# (sequence, first position, rows): decode, verify and prefill side by side; lengths that end in
# the middle of a page, at its last slot and at its first.
BATCHES = {
    "decode": [(0, 20, 1), (1, 7, 1), (2, 8, 1)],
    "verify": [(2, 10, 3), (0, 28, 3)],
    "prefill": [(1, 0, 19)],
    "mixed": [(0, 22, 3), (2, 15, 1), (1, 4, 21)],
}
all_batches = pytest.mark.parametrize("parts", BATCHES.values(), ids=BATCHES.keys())


def rows_of(parts: list[tuple[int, int, int]]) -> tuple[Tensor, Tensor]:
    """(row_seq, positions) of the packed rows."""
    row_seq = torch.cat([torch.full((n,), s) for s, _, n in parts])
    positions = torch.cat([torch.arange(p, p + n) for _, p, n in parts])
    return row_seq, positions


def page_table(draw: Draw, sequences: int = 3, pages: int = 4) -> Tensor:
    return draw.permutation(sequences * pages + 2)[: sequences * pages].view(sequences, -1).int()


@all_shapes
@all_dtypes
@all_batches
@pytest.mark.parametrize("first", [0, 1])
def test_index_logits_equal_the_sum_over_heads(
    shape: Shape, dtype: torch.dtype, parts: list[tuple[int, int, int]], first: int
) -> None:
    draw = Draw()
    table, (row_seq, positions) = page_table(draw), rows_of(parts)
    cache = draw.normal(14 * PAGE, shape.index_dim, dtype=dtype)
    query = draw.normal(len(row_seq), shape.index_heads, shape.index_dim, dtype=dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    weights = draw.normal(len(row_seq), shape.index_heads, dtype=wide, scale=0.1)
    context = int(positions.max()) + 1 + first
    got = index_logits(
        query, weights, cache, table, row_seq, positions + first, first, PAGE, context
    )
    assert got.dtype == wide
    want = torch.full((len(row_seq), context), -torch.inf, dtype=torch.float64)
    for row, (sequence, position) in enumerate(zip(row_seq, positions, strict=True)):
        for p in range(first, int(position) + first + 1):
            k = cache[int(table[sequence, p // PAGE]) * PAGE + p % PAGE].double()
            dots = torch.relu(query[row].double() @ k)
            want[row, p] = weights[row].double() @ dots
    assert_close("logits", want, got, key(wide))


def test_index_logits_in_small_parts_equal_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = Draw()
    table, (row_seq, positions) = page_table(draw), rows_of([(1, 0, 19), (0, 3, 2), (2, 9, 2)])
    cache = draw.normal(14 * PAGE, 6, dtype=torch.float64)
    query = draw.normal(len(row_seq), 2, 6, dtype=torch.float64)
    weights = draw.normal(len(row_seq), 2, dtype=torch.float64)
    call = (query, weights, cache, table, row_seq, positions, 0, PAGE, 19)
    whole = index_logits(*call)
    monkeypatch.setattr(index_reference, "_MAX_SCORES", 50)
    assert_close("logits", whole, index_logits(*call), "operator_fp64")


def test_a_short_sequence_beside_a_long_one_needs_no_pages_for_its_length() -> None:
    draw = Draw()
    table = torch.tensor([[3, 0, 1], [2, -1, -1]], dtype=torch.int32)
    cache = draw.normal(4 * PAGE, 6, dtype=torch.float64)
    query = draw.normal(2, 2, 6, dtype=torch.float64)
    weights = draw.normal(2, 2, dtype=torch.float64)
    last = torch.tensor([20, 4])
    both = index_logits(query, weights, cache, table, torch.tensor([0, 1]), last, 0, PAGE, 21)
    alone = index_logits(
        query[1:], weights[1:], cache, table, torch.tensor([1]), last[1:], 0, PAGE, 5
    )
    assert_close("short", alone[0], both[1, :5], "operator_fp64")
    assert both[1, 5:].isneginf().all()


def test_topk_ties_go_to_the_lower_position() -> None:
    inf = math.inf
    logits = torch.tensor(
        [
            [1.0, 3.0, 3.0, 3.0, 0.0, 5.0],
            [0.0, -0.0, 0.0, 0.0, -0.0, 0.0],  # both zeros are equal
            [2.0, 1.0, -inf, -inf, -inf, -inf],  # a row that sees two positions
            [-inf, -4.0, -9.0, -4.0, -4.0, -inf],  # an MTP row: position 0 is not in use
        ]
    )
    assert topk_select(logits, 3).tolist() == [[1, 2, 5], [0, 1, 2], [0, 1, -1], [1, 3, 4]]


def test_topk_of_short_rows_returns_every_position() -> None:
    logits = torch.tensor([[0.5, -torch.inf, -torch.inf], [3.0, 1.0, 2.0]])
    assert topk_select(logits, 8).tolist() == [[0, -1, -1], [0, 1, 2]]
    assert topk_select(logits, 3).tolist() == [[0, -1, -1], [0, 1, 2]]


def test_topk_of_random_rows_with_many_ties() -> None:
    draw = Draw(3)
    logits = draw.ints(6, 40, 57).double()
    lengths = draw.ints(57, 40) + 1
    logits[torch.arange(57)[None] >= lengths[:, None]] = -torch.inf
    got = topk_select(logits, 13)
    for row, length in enumerate(lengths.tolist()):
        order = sorted(range(length), key=lambda p: (-logits[row, p].item(), p))
        want = sorted(order[:13])
        assert got[row].tolist() == want + [-1] * (13 - len(want))


def test_slot_lookup_keeps_unused_places() -> None:
    table = torch.tensor([[3, 0], [2, 5]], dtype=torch.int32)
    positions = torch.tensor([[0, 7, 8, -1], [9, 15, -1, -1]], dtype=torch.int32)
    got = slot_lookup(positions, table, torch.tensor([0, 1]), PAGE)
    assert got.tolist() == [[24, 31, 0, -1], [41, 47, -1, -1]]


@all_shapes
@all_dtypes
def test_sparse_mla_and_value_up_equal_softmax_attention(shape: Shape, dtype: torch.dtype) -> None:
    draw = Draw()
    rows, latent = shape.rows, shape.kv_lora
    cache = draw.normal(60, latent + shape.rope, dtype=dtype)
    query = draw.normal(rows, shape.heads, latent + shape.rope, dtype=dtype)
    slots = torch.stack([draw.permutation(60)[: shape.topk] for _ in range(rows)])
    counts = draw.ints(shape.topk, rows) + 1
    slots[torch.arange(shape.topk)[None] >= counts[:, None]] = -1
    scale = (shape.nope + shape.rope) ** -0.5
    got = sparse_mla(query, cache, slots, latent, scale)
    w_uv = draw.normal(shape.heads, shape.v, latent, dtype=dtype, scale=0.2)
    up = value_up(got, w_uv).view(rows, shape.heads, shape.v)
    for row in range(rows):
        keys = cache[slots[row, : counts[row]]].double()
        weights = (query[row].double() @ keys.T * scale).softmax(-1)
        want = weights @ keys[:, :latent]
        assert_close(f"row {row}", want, got[row], key(dtype))
        raised = torch.einsum("hc,hvc->hv", got[row].double(), w_uv.double())
        assert_close(f"value {row}", raised, up[row], key(dtype))


def test_sparse_mla_without_any_slot_gives_zeros_and_parts_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw = Draw()
    cache = draw.normal(20, 12, dtype=torch.float64)
    query = draw.normal(9, 2, 12, dtype=torch.float64)
    slots = draw.ints(20, 9, 4)
    slots[4] = -1
    whole = sparse_mla(query, cache, slots, 8, 0.3)
    assert (whole[4] == 0.0).all()
    assert whole[3].abs().sum() > 0
    monkeypatch.setattr(mla_reference, "_MAX_GATHERED", 100)
    assert_close("parts", whole, sparse_mla(query, cache, slots, 8, 0.3), "operator_fp64")
