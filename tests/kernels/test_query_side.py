# SPDX-License-Identifier: Apache-2.0
"""Absorption, value-up and index queries against the reference."""

from __future__ import annotations

import pytest
import torch

from glmserve.kernels.quant import quantise_index
from glmserve.kernels.quantise.reference import quantise
from glmserve.kernels.query_side import reference
from glmserve.kernels.query_side.kernel import absorb_query, index_query
from glmserve.kernels.rope.reference import rope_table
from glmserve.kernels.value_up import reference as value_reference
from glmserve.kernels.value_up.kernel import value_up, value_up_quantised


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want).norm() / want.norm())


@pytest.mark.parametrize(("nope", "v", "latent"), [(192, 256, 512), (32, 32, 256)])
@pytest.mark.parametrize("rows", [1, 19, 70])
def test_absorption_and_value_up(
    device: torch.device, rows: int, nope: int, v: int, latent: int
) -> None:
    heads = 2
    kv_b = torch.randn(heads, nope + v, latent, device=device).bfloat16() * 0.05
    w_uk, w_uv = kv_b[:, :nope], kv_b[:, nope:]  # slices, as the model has them
    query = torch.randn(rows, heads, nope + 64, device=device).bfloat16()
    rope = rope_table(torch.arange(rows, device=device) * 31, 64, 8e6, torch.float32)
    want = reference.absorb_query(query.float(), w_uk.float(), rope)
    got = absorb_query(query, w_uk, rope)
    assert relative(got[..., :latent], want[..., :latent]) < 4e-3
    assert relative(got[..., latent:], want[..., latent:]) < 4e-3
    up = value_up(got[..., :latent].contiguous(), w_uv)
    wide = value_reference.value_up(got[..., :latent].float(), w_uv.float())
    assert up.shape == (rows, heads * v)
    assert relative(up, wide) < 4e-3
    if v % 128 == 0:
        up8 = value_up_quantised(got[..., :latent].contiguous(), w_uv)
        assert all(torch.equal(a, b) for a, b in zip(up8, quantise(up), strict=True))


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
def test_index_queries(device: torch.device, fp8: bool) -> None:
    rows = 3
    query = torch.randn(rows, 32, 128, device=device)
    query[1, 5] *= 1000
    query[2, 7] = 0
    query = query.bfloat16()
    weights = torch.randn(rows, 40, device=device).bfloat16()[:, 4:36]  # a slice of a projection
    rope = rope_table(torch.tensor([3, 70_000, 12], device=device), 64, 8e6, torch.float32)
    wide, scaled = reference.index_query(query.float(), weights.float()[None], rope)
    got, got_weights = index_query(query, weights[None], rope, fp8)
    parts = torch.stack((weights.float() / 4, weights.float() / 2, weights.float() / 4))
    assert torch.equal(index_query(query, parts, rope, fp8)[1], got_weights)
    if fp8:
        values, scale = quantise_index(wide)
        assert (got_weights - scaled * scale).abs().max() <= 1e-6 * (scaled * scale).abs().max()
        # RoPE may differ in its last fp32 bit, which moves few values to the next code.
        assert (got.float() != values.float()).float().mean() < 1e-3
    else:
        assert relative(got, wide) < 4e-3
        assert torch.allclose(got_weights, scaled)
