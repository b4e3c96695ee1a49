# SPDX-License-Identifier: Apache-2.0
"""The operators' plain-torch forms on fp8 caches: what is written can be read and attended to."""

from __future__ import annotations

import pytest
import torch

from glmserve.kernels.dispatch import UnservedShape, allow_reference, use_kernel
from glmserve.kernels.index_logits import index_logits
from glmserve.kernels.latent_inputs import IndexKeyNorm, latent_inputs
from glmserve.kernels.quant import (
    latent_row_bytes,
    pack_latent_rows,
    read_index_pages,
    unpack_latent_rows,
)
from glmserve.kernels.query_side import index_query
from glmserve.kernels.rope.reference import rope_table
from glmserve.kernels.sparse_mla import sparse_mla
from glmserve.kernels.topk_select import topk_select

SLOTS = 192


def written(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Latent and index caches after one write to every slot."""
    torch.manual_seed(3)
    fp8 = dtype == torch.uint8
    projected = torch.randn(SLOTS, 64 + 576 + 128)
    rope = rope_table(torch.arange(SLOTS), 64, 8e6, torch.float32)
    latent = torch.zeros(SLOTS, 656 if fp8 else 576, dtype=dtype)
    index = torch.zeros(SLOTS, 132 if fp8 else 128, dtype=dtype)
    norm = IndexKeyNorm(torch.rand(128), torch.rand(128))
    slots = torch.arange(SLOTS).flip(0)
    latent_inputs(
        projected, torch.ones(64), torch.rand(512), rope, slots, latent, index, norm, 1e-5
    )
    return latent, index


def test_written_rows_are_the_wide_rows_within_fp8() -> None:
    latent, index = written(torch.uint8)
    wide, wide_index = written(torch.float32)
    rows = unpack_latent_rows(latent)
    assert (rows[:, :512] - wide[:, :512]).norm() < 0.03 * wide[:, :512].norm()
    assert torch.equal(rows[:, 512:], wide[:, 512:].bfloat16().float())
    keys = read_index_pages(index, torch.arange(3)).flatten(0, 1)
    assert (keys - wide_index).norm() < 0.03 * wide_index.norm()


def test_a_latent_of_256_has_rows_of_its_own_size() -> None:
    latent, rope = torch.randn(40, 256), torch.randn(40, 64)
    rows = pack_latent_rows(latent, rope)
    assert rows.shape[1] == latent_row_bytes(256) == 256 + 8 + 128
    assert latent_row_bytes(512) == 656
    back = unpack_latent_rows(rows)
    assert (back[:, :256] - latent).norm() < 0.03 * latent.norm()
    assert torch.equal(back[:, 256:], rope.bfloat16().float())


def test_attention_reads_fp8_rows() -> None:
    latent, _ = written(torch.uint8)
    query = torch.randn(2, 3, 576)
    slots = torch.tensor([[5, 100, 7, -1], [191, -1, -1, -1]])
    got = sparse_mla(query, latent, slots, 512, 0.1)
    assert torch.allclose(got, sparse_mla(query, unpack_latent_rows(latent), slots, 512, 0.1))


def test_scores_of_fp8_keys_and_queries_are_close_to_the_wide_ones() -> None:
    _, index = written(torch.uint8)
    _, wide = written(torch.float32)
    query, weights = torch.randn(4, 32, 128), torch.randn(4, 32)
    rope = rope_table(torch.arange(4), 64, 8e6, torch.float32)
    where = (torch.tensor([[2, 0, 1]], dtype=torch.int32), torch.zeros(4, dtype=torch.int64))
    last, context = torch.tensor([150, 151, 152, 153]), SLOTS
    q, w = index_query(query, weights[None], rope)
    want = index_logits(q, w, wide, *where, last, 0, 64, context)
    q, w = index_query(query, weights[None], rope, fp8=True)
    got = index_logits(q, w, index, *where, last, 0, 64, context)
    seen = ~want.isneginf()
    assert torch.equal(seen, ~got.isneginf())
    assert (got[seen] - want[seen]).norm() < 0.05 * want[seen].norm()


def test_selection_ignores_what_the_row_does_not_see() -> None:
    scores = torch.tensor([[9.0, 1.0, 3.0, 2.0, 8.0]])
    assert topk_select(scores, 2, torch.tensor([3]), 1).tolist() == [[2, 3]]
    assert topk_select(scores, 4, torch.tensor([2]), 1).tolist() == [[1, 2, -1, -1]]


def test_an_unserved_shape_is_refused_by_name_unless_the_reference_is_allowed() -> None:
    with pytest.raises(UnservedShape, match="sparse_mla: no Triton kernel for heads=5"):
        use_kernel("sparse_mla", "cuda", {"heads": 5})
    allow_reference(True)
    try:
        assert not use_kernel("sparse_mla", "cuda", {"heads": 5})
    finally:
        allow_reference(False)
    assert use_kernel("sparse_mla", "cuda", {})
    assert not use_kernel("sparse_mla", "cpu", {})
