# SPDX-License-Identifier: Apache-2.0
"""Norms, RoPE and the operator that writes both caches, against element-by-element formulas."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from glmserve.kernels.latent_inputs import IndexKeyNorm, latent_inputs
from glmserve.kernels.mtp_input import mtp_input
from glmserve.kernels.query_side import absorb_query, index_query
from glmserve.kernels.residual_norm import residual_rms_norm
from glmserve.kernels.residual_norm.reference import rms_norm
from glmserve.kernels.rope.reference import rope_table
from tests.kernels.shapes import Draw, Shape, all_dtypes, all_shapes, key
from tests.tolerances import assert_close

THETA = 8e6


def naive_rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().sum(-1, keepdim=True) / x.shape[-1] + eps).sqrt() * weight.double()


def naive_rope(x: Tensor, positions: Tensor) -> Tensor:
    """x [R, d]: pair (2i, 2i + 1) turned by p * theta^(-2i / d)."""
    out, dim = x.double().clone(), x.shape[1]
    for row, position in enumerate(positions.tolist()):
        for i in range(dim // 2):
            angle = position * THETA ** (-2 * i / dim)
            a, b = float(x[row, 2 * i]), float(x[row, 2 * i + 1])
            out[row, 2 * i] = a * math.cos(angle) - b * math.sin(angle)
            out[row, 2 * i + 1] = a * math.sin(angle) + b * math.cos(angle)
    return out


@all_shapes
@all_dtypes
def test_rms_norm_and_its_residual_form(shape: Shape, dtype: torch.dtype) -> None:
    draw = Draw()
    x, residual = (draw.normal(shape.rows, shape.hidden, dtype=dtype, scale=3.0) for _ in "xr")
    weight = draw.normal(shape.hidden, dtype=dtype)
    assert_close("norm", naive_rms(x, weight, 1e-5), rms_norm(x, weight, 1e-5), key(dtype))
    normed, total = residual_rms_norm(x, residual, weight, 1e-5)
    assert_close("sum", x.double() + residual.double(), total, key(dtype))
    assert torch.equal(normed.rows, rms_norm(total, weight, 1e-5))
    alone, kept = residual_rms_norm(x, None, weight, 1e-5)
    assert torch.equal(kept, x)
    assert torch.equal(alone.rows, rms_norm(x, weight, 1e-5))


def test_a_wide_partial_sum_is_rounded_once() -> None:
    """1 + 2^-9 + 2^-9 is lost when the parts are rounded to bf16 one by one."""
    x = torch.tensor([[2.0**-8]])  # fp32 sum of the ranks' parts
    residual = torch.ones(1, 1, dtype=torch.bfloat16)
    _, total = residual_rms_norm(x + 2.0**-9, residual, torch.ones(1, dtype=torch.bfloat16), 1e-5)
    assert total.item() == 1.0 + 2.0**-7


@all_shapes
@all_dtypes
def test_latent_inputs_norms_ropes_and_writes_its_slots_only(
    shape: Shape, dtype: torch.dtype
) -> None:
    draw = Draw()
    rows, rope, index = shape.rows, shape.rope, shape.index_dim
    widths = [shape.q_lora, shape.kv_lora, rope, index, shape.index_heads]
    projected = draw.normal(rows, sum(widths), dtype=dtype)
    q_norm = draw.normal(shape.q_lora, dtype=dtype)
    kv_norm = draw.normal(shape.kv_lora, dtype=dtype)
    norm = IndexKeyNorm(draw.normal(index, dtype=dtype), draw.normal(index, dtype=dtype))
    positions = draw.ints(3000, rows)
    slots = draw.permutation(2 * rows + 3)[:rows]
    latent = torch.full((2 * rows + 3, shape.kv_lora + rope), 7.0, dtype=dtype)
    keys = torch.full((2 * rows + 3, index), 7.0, dtype=dtype)
    table = rope_table(positions, rope, THETA, dtype)
    got = latent_inputs(projected, q_norm, kv_norm, table, slots, latent, keys, norm, 1e-6).rows

    q, kv, k_rope, k_index, _ = torch.split(projected, widths, dim=1)
    assert_close("q latent", naive_rms(q, q_norm, 1e-6), got, key(dtype))
    row = torch.cat((naive_rms(kv, kv_norm, 1e-6), naive_rope(k_rope, positions)), 1)
    assert_close("latent cache", row, latent[slots], key(dtype))
    wide = k_index.double()
    wide = (wide - wide.mean(1, keepdim=True)) / (
        wide.var(1, keepdim=True, unbiased=False) + norm.eps
    ).sqrt() * norm.weight.double() + norm.bias.double()
    wide = torch.cat((naive_rope(wide[:, :rope], positions), wide[:, rope:]), 1)
    assert_close("index cache", wide, keys[slots], key(dtype))
    untouched = torch.ones(len(latent), dtype=torch.bool)
    untouched[slots] = False
    assert (latent[untouched] == 7.0).all()
    assert (keys[untouched] == 7.0).all()


@all_shapes
@all_dtypes
def test_absorbed_query_keeps_the_unabsorbed_score(shape: Shape, dtype: torch.dtype) -> None:
    """q_nope . (W_UK c) + rope(q) . k == q' . [c | k], head by head."""
    draw = Draw()
    query = draw.normal(shape.rows, shape.heads, shape.nope + shape.rope, dtype=dtype)
    w_uk = draw.normal(shape.heads, shape.nope, shape.kv_lora, dtype=dtype, scale=0.1)
    positions = draw.ints(500, shape.rows)
    got = absorb_query(query, w_uk, rope_table(positions, shape.rope, THETA, dtype))
    for head in range(shape.heads):
        nope, rope = query[:, head, : shape.nope], query[:, head, shape.nope :]
        want = torch.cat((nope.double() @ w_uk[head].double(), naive_rope(rope, positions)), 1)
        assert_close(f"head {head}", want, got[:, head], key(dtype))


@all_shapes
@all_dtypes
def test_index_query_ropes_the_first_dimensions_and_scales_weights(
    shape: Shape, dtype: torch.dtype
) -> None:
    draw = Draw()
    query = draw.normal(shape.rows, shape.index_heads, shape.index_dim, dtype=dtype)
    weights = draw.normal(shape.rows, shape.index_heads, dtype=dtype)
    positions = draw.ints(500, shape.rows)
    table = rope_table(positions, shape.rope, THETA, dtype)
    got, scaled = index_query(query, weights[None], table)
    for head in range(shape.index_heads):
        want = query[:, head].double().clone()
        want[:, : shape.rope] = naive_rope(query[:, head, : shape.rope], positions)
        assert_close(f"head {head}", want, got[:, head], key(dtype))
    factor = shape.index_dim**-0.5 * shape.index_heads**-0.5
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert scaled.dtype == wide
    assert_close("weights", weights.double() * factor, scaled, key(wide))


def test_mtp_input_puts_the_embedding_first() -> None:
    draw = Draw()
    embedding, hidden = (draw.normal(3, 6, dtype=torch.float64) for _ in "eh")
    one, two = (draw.normal(6, dtype=torch.float64) for _ in "12")
    got = mtp_input(embedding, hidden, one, two, 1e-5)
    want = torch.cat((naive_rms(embedding, one, 1e-5), naive_rms(hidden, two, 1e-5)), 1)
    assert_close("joined", want, got, "operator_fp64")
