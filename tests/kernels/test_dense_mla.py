# SPDX-License-Identifier: Apache-2.0
"""Dense prefill attention: kernel against reference, reference against the sparse operators."""

from __future__ import annotations

import pytest
import torch

from glmserve.kernels.dense_mla import launch, reference
from glmserve.kernels.quant import pack_latent_rows
from glmserve.kernels.query_side.reference import absorb_query
from glmserve.kernels.rope.reference import rope_table
from glmserve.kernels.sparse_mla.reference import sparse_mla
from glmserve.kernels.value_up.reference import value_up
from tests.tolerances import assert_close

PAGES, SCALE = 6, 256**-0.5
TABLE = torch.tensor([[0, 0, 0, 0], [4, 1, 5, 2]], dtype=torch.int32)
# (rows, context, first): alone, behind an earlier chunk, several tiles of rows, the MTP layer's
SHAPES = [(5, 5, 0), (7, 100, 0), (133, 150, 0), (60, 129, 1), (1, 64, 0)]


def inputs(
    rows: int, context: int, dtype: torch.dtype, heads: int = 2
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(query, rope, cache rows [slots, 576], kv_b)."""
    query = torch.randn(rows, heads, 256).to(dtype)
    rope = rope_table(torch.arange(context - rows, context), 64, 8e6, dtype)
    cache = torch.randn(PAGES * 64, 576).to(dtype)
    kv_b = (torch.randn(heads, 448, 512) * 0.06).to(dtype)
    return query, rope, cache, kv_b


@pytest.mark.parametrize(("rows", "context", "first"), SHAPES)
def test_reference_equals_sparse_attention_over_everything(
    rows: int, context: int, first: int
) -> None:
    query, rope, cache, kv_b = inputs(rows, context, torch.float64)
    got = reference.dense_mla(query, rope, cache, TABLE, 1, kv_b, context, first, SCALE, 64, 192)
    place = torch.arange(context)
    slots = TABLE[1].long()[place // 64] * 64 + place % 64
    seen = (place <= torch.arange(context - rows, context)[:, None]) & (place >= first)
    latent = sparse_mla(
        absorb_query(query, kv_b[:, :192], rope),
        cache,
        torch.where(seen, slots, -1),
        512,
        SCALE,
    )
    assert_close("dense", value_up(latent, kv_b[:, 192:]), got, "operator_fp64")


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize(("rows", "context", "first"), SHAPES)
def test_kernel_equals_the_reference(
    device: torch.device, rows: int, context: int, first: int, fp8: bool
) -> None:
    query, rope, cache, kv_b = inputs(rows, context, torch.bfloat16)
    if fp8:
        cache = pack_latent_rows(cache[:, :512].float(), cache[:, 512:].float())
    want = reference.dense_mla(
        query.float(), rope, cache if fp8 else cache.float(), TABLE, 1, kv_b.float(), context,
        first, SCALE, 64, 192,
    )  # fmt: skip
    on = [x.to(device) for x in (query, rope, cache, TABLE)]
    got = launch.dense_mla(*on, 1, kv_b.to(device), context, first, SCALE)
    assert_close("dense", want, got, "operator_bf16")


def test_rows_do_not_depend_on_the_rows_beside_them(device: torch.device) -> None:
    query, rope, cache, kv_b = (x.to(device) for x in inputs(150, 150, torch.bfloat16))
    table = TABLE.to(device)
    whole = launch.dense_mla(query, rope, cache, table, 1, kv_b, 150, 0, SCALE)
    part = launch.dense_mla(query[90:150], rope[90:150], cache, table, 1, kv_b, 150, 0, SCALE)
    assert torch.equal(part, whole[90:])
