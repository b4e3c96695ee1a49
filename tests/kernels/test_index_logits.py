# SPDX-License-Identifier: Apache-2.0
"""Index score kernels against the reference: verify rows, mixed steps, permuted pages."""

from __future__ import annotations

import pytest
import torch

from glmserve.kernels.index_logits import kernel, reference
from glmserve.kernels.index_logits.kernel import index_logits, unserved
from glmserve.kernels.quant import quantise_index, read_index_pages, write_index_rows

PAGES, WIDE = 24, 6  # physical pages; logical pages of a line


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """So few that stretches of pages go from one request to the next."""
    monkeypatch.setattr(kernel, "CTAS", 5)
    if device.type == "cuda":
        from glmserve.kernels.index_logits.hopper import launch

        monkeypatch.setattr(launch, "SMS", 2)


def make(
    device: torch.device, counts: list[int], contexts: list[int], fp8: bool, heads: int = 32
) -> dict[str, torch.Tensor]:
    """counts[s] rows at the end of sequence s, which has contexts[s] positions."""
    keys = torch.randn(PAGES * 64, 128)
    keys[::11] *= 20
    table = torch.randperm(PAGES, dtype=torch.int32)[: len(counts) * WIDE].view(-1, WIDE)
    rows = sum(counts)
    query = torch.randn(rows, heads, 128)
    weights = torch.randn(rows, heads) * 0.1
    if fp8:
        cache = torch.zeros(PAGES * 64, 132, dtype=torch.uint8)
        write_index_rows(cache, torch.arange(PAGES * 64), keys)
        values = read_index_pages(cache, torch.arange(PAGES)).flatten(0, 1)
        query, scale = quantise_index(query)
        weights = weights * scale
    else:
        cache, query = keys.bfloat16(), query.bfloat16()
        values = cache.float()
    last = [c - n + i for n, c in zip(counts, contexts, strict=True) for i in range(n)]
    sequence = [s for s, n in enumerate(counts) for _ in range(n)]
    case = {
        "query": query,
        "weights": weights,
        "cache": cache,
        "values": values,
        "table": table,
        "row_seq": torch.tensor(sequence),
        "last": torch.tensor(last),
    }
    return {name: tensor.to(device) for name, tensor in case.items()}


def compare(case: dict[str, torch.Tensor], per_sequence: int | None, first: int = 0) -> None:
    c = case
    context = WIDE * 64
    want = reference.index_logits(
        c["query"].float(), c["weights"], c["values"], c["table"], c["row_seq"], c["last"],
        first, 64, context,
    )  # fmt: skip
    inputs = (c["query"], c["weights"], c["cache"], c["table"], c["row_seq"], c["last"], first)
    got = index_logits(*inputs, context, per_sequence, True)
    assert torch.equal(got.isneginf(), want.isneginf())
    seen = ~want.isneginf()
    # The fp8 products of Hopper keep some 14 bits in their sums.
    assert (got[seen] - want[seen]).norm() <= 4e-4 * want[seen].norm()
    loose = index_logits(*inputs, context, per_sequence, False)
    assert torch.equal(loose[seen], got[seen])


@pytest.mark.parametrize("rows", [1, 2, 3, 6, 9])
def test_rows_of_a_request_share_its_keys(device: torch.device, rows: int) -> None:
    compare(make(device, [rows] * 3, [9, 64 + rows, 6 * 64], True), rows)


def test_the_first_position_in_use_is_respected(device: torch.device) -> None:
    compare(make(device, [2, 2], [2, 200], True), 2, first=1)


@pytest.mark.parametrize("rows", [3, 9])
def test_a_row_has_the_same_scores_alone_and_beside_others(device: torch.device, rows: int) -> None:
    c = make(device, [rows] * 2, [rows, 130], True)
    shared = (c["cache"], c["table"])

    def scores(some: slice, per_sequence: int | None) -> torch.Tensor:
        query, weights = c["query"][some].contiguous(), c["weights"][some].contiguous()
        seq, last = c["row_seq"][some].clone(), c["last"][some].clone()
        return index_logits(query, weights, *shared, seq, last, 0, 192, per_sequence, True)

    together = scores(slice(0, 2 * rows), rows)
    assert torch.equal(scores(slice(0, 2 * rows), None), together)
    for row in (rows - 1, rows):
        assert torch.equal(scores(slice(row, row + 1), 1)[0], together[row])


@pytest.mark.parametrize("heads", [32, 8])
@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
def test_requests_with_any_number_of_rows(device: torch.device, fp8: bool, heads: int) -> None:
    compare(make(device, [1, 13, 1, 4], [100, 13, 383, 70], fp8, heads), None)


@pytest.mark.parametrize("rows", [1, 4])
def test_a_small_model_has_fewer_heads(device: torch.device, rows: int) -> None:
    compare(make(device, [rows] * 3, [9, 64 + rows, 6 * 64], True, 8), rows)


def test_a_width_that_is_no_multiple_of_a_page(device: torch.device) -> None:
    c = make(device, [2], [100], True)
    inputs = (c["query"], c["weights"], c["cache"], c["table"], c["row_seq"], c["last"], 0)
    whole = index_logits(*inputs, 128, 2, True)
    assert torch.equal(index_logits(*inputs, 101, 2, True), whole[:, :101])


def test_dimensions_that_the_kernel_does_not_serve_are_named() -> None:
    query = torch.empty(1, 4, 64, dtype=torch.bfloat16)
    wrong = unserved(query, torch.empty(64, 132, dtype=torch.uint8), 16)
    assert set(wrong) == {"index heads", "index dim", "page size", "index dtypes"}
