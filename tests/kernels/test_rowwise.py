# SPDX-License-Identifier: Apache-2.0
"""Kernels that work row by row: quantisation, SwiGLU, norms, the MTP input and the embedding."""

from __future__ import annotations

import pytest
import torch

from glmserve.kernels.mtp_input import launch as mtp_launch
from glmserve.kernels.mtp_input import reference as mtp_reference
from glmserve.kernels.quantise import QuantRows, dequantise
from glmserve.kernels.quantise import launch as quantise_launch
from glmserve.kernels.quantise import reference as quantise_reference
from glmserve.kernels.residual_norm import launch as norm_launch
from glmserve.kernels.residual_norm import reference as norm_reference
from glmserve.kernels.swiglu import launch as swiglu_launch
from glmserve.kernels.swiglu import reference as swiglu_reference
from glmserve.kernels.vocabulary import launch as vocabulary_launch
from glmserve.kernels.vocabulary import reference as vocabulary_reference
from tests.tolerances import assert_close


def rows_of(rows: int, width: int, device: torch.device) -> torch.Tensor:
    """bf16 rows with outliers; the first group of the middle row is zero."""
    x = torch.randn(rows, width)
    x[:, width // 3] *= 500
    x[rows // 2, :128] = 0
    return x.bfloat16().to(device)


def assert_same_rows(got: QuantRows, want: QuantRows) -> None:
    """Bit for bit, but that -0 is 0."""
    assert torch.equal(got.scales, want.scales)
    assert torch.equal(got.values.float(), want.values.float())


@pytest.mark.parametrize(("rows", "width"), [(1, 128), (5, 1152)])
def test_quantisation_equals_the_reference_in_every_bit(
    device: torch.device, rows: int, width: int
) -> None:
    x = rows_of(rows, width, device)
    x[0, -1] = 3e38
    assert_same_rows(quantise_launch.quantise(x), quantise_reference.quantise(x))


def test_quantised_rows_come_back_within_an_e4m3_step() -> None:
    x = rows_of(4, 256, torch.device("cpu"))
    largest = x.float().view(4, 2, 128).abs().amax(-1).repeat_interleave(128, 1)
    error = (dequantise(quantise_reference.quantise(x)) - x.float()).abs()
    assert (error <= largest / 28 + 1e-9).all()


@pytest.mark.parametrize("width", [200, 640])
def test_residual_norm_matches_the_reference(device: torch.device, width: int) -> None:
    x, residual = rows_of(5, width, device), rows_of(5, width, device)
    weight = torch.randn(width).bfloat16().to(device)
    want, want_total = norm_reference.residual_rms_norm(x, residual, weight, 1e-5)
    normed, total, _ = norm_launch.residual_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, want_total)
    assert_close("normed", want, normed, "operator_bf16")
    unrounded = x.float() + 1e-4  # the sum of several ranks, not yet in bf16
    _, total, _ = norm_launch.residual_norm(unrounded, residual, weight, 1e-5)
    assert torch.equal(total, (unrounded + residual.float()).bfloat16())
    alone, total, _ = norm_launch.residual_norm(x, None, weight, 1e-5)
    assert total is x
    assert_close("alone", norm_reference.rms_norm(x, weight, 1e-5), alone, "operator_bf16")
    rounded, total, _ = norm_launch.residual_norm(unrounded, None, weight, 1e-5)
    assert torch.equal(total, unrounded.bfloat16())
    assert torch.equal(rounded, norm_launch.residual_norm(total, None, weight, 1e-5)[0])


def test_norm_quantises_what_it_returns(device: torch.device) -> None:
    x, residual = rows_of(3, 384, device), rows_of(3, 384, device)
    weight = torch.randn(384).bfloat16().to(device)
    normed, _, rows8 = norm_launch.residual_norm(x, residual, weight, 1e-5, quantised=True)
    assert rows8 is not None
    assert_same_rows(rows8, quantise_reference.quantise(normed))


@pytest.mark.parametrize("inner", [256, 640])
def test_swiglu_matches_the_reference_and_quantises_it(device: torch.device, inner: int) -> None:
    gate_up = torch.randn(5, 2 * inner).bfloat16().to(device) * 3
    plain = swiglu_launch.swiglu(gate_up)
    assert_close("swiglu", swiglu_reference.swiglu(gate_up), plain, "operator_bf16")
    assert_same_rows(swiglu_launch.swiglu_quantised(gate_up), quantise_reference.quantise(plain))


def test_swiglu_adds_split_sums_in_order_and_stops_at_the_count(device: torch.device) -> None:
    parts = torch.randn(3, 6, 512, device=device)
    total = (parts[0] + parts[1] + parts[2]).bfloat16()
    count = torch.tensor([4], dtype=torch.int32, device=device)
    got = swiglu_launch.swiglu_parts(parts, count)[:4]
    assert torch.equal(got, swiglu_launch.swiglu(total)[:4])


def test_mtp_input_matches_the_reference(device: torch.device) -> None:
    tensors = [rows_of(3, 200, device) for _ in range(2)]
    tensors += [torch.randn(200).bfloat16().to(device) for _ in range(2)]
    want = mtp_reference.mtp_input(*tensors, 1e-5)
    got = mtp_launch.mtp_input(*tensors, 1e-5)
    assert_close("mtp input", want, got, "operator_bf16")
    for columns in (slice(0, 100), slice(150, 250), slice(300, 400)):  # shares of ranks
        part = mtp_launch.mtp_input(*tensors, 1e-5, columns)
        assert torch.equal(part, got[:, columns])
        same = mtp_reference.mtp_input(*tensors, 1e-5, columns)
        assert torch.equal(same, want[:, columns])


def test_embedding_and_head_shards_match_the_reference(device: torch.device) -> None:
    table = rows_of(12, 1100, device)
    tokens = torch.tensor([7, 5, 16, 17, 0, 90], device=device)
    want = vocabulary_reference.embed_shard(tokens, table, 5)
    assert torch.equal(vocabulary_launch.embed_shard(tokens, table, 5), want)
    weight, hidden = torch.randn(130, 256).bfloat16(), torch.randn(5, 256).bfloat16()
    logits = vocabulary_launch.head_shard(hidden.to(device), weight.to(device))
    assert logits.dtype == torch.float32
    assert_close("logits", hidden.float() @ weight.float().T, logits, "operator_fp32")
