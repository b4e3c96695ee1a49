# SPDX-License-Identifier: Apache-2.0
"""Products against dequantised formulas on ragged sizes, and a row's bits alone and in a step."""

from __future__ import annotations

import pytest
import torch

from glmserve.kernels.dispatch import UnservedShape, allow_reference, use_kernel
from glmserve.kernels.linear import (
    QuantWeight,
    dequantise_weight,
    hopper,
    hopper_few,
    hopper_head,
    hopper_mid,
    launch,
    linear,
    quantise_weight,
    reference,
)
from glmserve.kernels.linear.parts import linear_parts
from glmserve.kernels.quantise import QuantRows, quantise
from tests.tolerances import assert_close

# rows: each tile height, its ragged edge, and the many-row kernel split and whole.
SIZES = [(1, 200, 768), (17, 136, 1536), (40, 328, 384), (70, 136, 1536), (150, 264, 256)]
sizes = pytest.mark.parametrize(
    ("rows", "width", "depth"), SIZES, ids=["x".join(map(str, size)) for size in SIZES]
)


def outlier_weight(width: int, depth: int) -> torch.Tensor:
    """Of size 1 / sqrt(depth), with one row, one column and one number far larger."""
    weight = torch.randn(width, depth) * depth**-0.5
    weight[3] *= 40
    weight[:, 9] *= 10
    weight[width - 1, depth - 1] = 8.0
    return weight


def outlier_rows(rows: int, depth: int) -> torch.Tensor:
    x = torch.randn(rows, depth)
    x[:, 70] *= 30
    x[rows // 2, :128] = 0
    return x.bfloat16()


@sizes
def test_block_fp8_matches_the_dequantised_product(
    device: torch.device, rows: int, width: int, depth: int
) -> None:
    weight = QuantWeight(*(t.to(device) for t in quantise_weight(outlier_weight(width, depth))))
    x = QuantRows(*(t.to(device) for t in quantise(outlier_rows(rows, depth))))
    want = reference.quant_linear(x, weight)
    assert_close("fp32 result", want, launch.linear(x, weight, torch.float32), "operator_bf16")
    assert_close("bf16 result", want, launch.linear(x, weight, torch.bfloat16), "operator_bf16")


@sizes
def test_bf16_matches_the_product(device: torch.device, rows: int, width: int, depth: int) -> None:
    weight = outlier_weight(width, depth).bfloat16().to(device)
    x = outlier_rows(rows, depth).to(device)
    want = x.float() @ weight.float().T
    assert_close("fp32 result", want, launch.linear(x, weight, torch.float32), "operator_bf16")


@pytest.mark.parametrize(("rows", "depth"), [(3, 1536), (40, 1536), (300, 1536), (3, 320), (3, 48)])
def test_parts_add_up_to_the_products_bits(device: torch.device, rows: int, depth: int) -> None:
    weight, x = outlier_weight(136, 1536).bfloat16().to(device), outlier_rows(rows, 1536).to(device)
    weight, x = weight[:, :depth].contiguous(), x[:, :depth].contiguous()
    parts = linear_parts(x, weight)
    assert (len(parts) > 1) == (depth == 1536 and rows <= 256)
    whole = launch.linear(x, weight, torch.bfloat16)
    assert torch.equal(reference.added(parts, torch.bfloat16), whole)


def test_bf16_takes_depths_of_64(device: torch.device) -> None:
    weight, x = outlier_weight(72, 320).bfloat16().to(device), outlier_rows(5, 320).to(device)
    want = x.float() @ weight.float().T
    assert_close("result", want, launch.linear(x, weight, torch.float32), "operator_bf16")


@pytest.mark.parametrize("depth", [8, 48, 96])
def test_narrow_inputs_have_one_order_of_their_sum(device: torch.device, depth: int) -> None:
    weight, x = (torch.randn(n, depth).bfloat16().to(device) for n in (72, 70))
    want = x.float() @ weight.float().T
    for dtype in (torch.float32, torch.bfloat16):
        got = launch.linear(x, weight, dtype)
        assert_close(str(dtype), want, got, "operator_bf16")
        assert torch.equal(launch.linear(x[3:4], weight, dtype), got[3:4])


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
def test_a_row_has_the_same_bits_alone_and_in_any_step(device: torch.device, fp8: bool) -> None:
    width, depth = 136, 1536
    assert launch.plan(width, depth, fp8).chunks > 1  # else nothing could be split differently
    dense, rows = outlier_weight(width, depth), outlier_rows(150, depth)
    weight = quantise_weight(dense) if fp8 else dense.bfloat16()
    whole: torch.Tensor | QuantRows = quantise(rows) if fp8 else rows

    def run(first: int, count: int) -> torch.Tensor:
        if isinstance(weight, QuantWeight) and isinstance(whole, QuantRows):
            values = whole.values[first : first + count].contiguous().to(device)
            scales = whole.scales[:, first : first + count].contiguous().to(device)
            on_device = QuantWeight(*(t.to(device) for t in weight))
            return launch.linear(QuantRows(values, scales), on_device, torch.float32)
        assert isinstance(whole, torch.Tensor)
        assert isinstance(weight, torch.Tensor)
        part = whole[first : first + count].contiguous().to(device)
        return launch.linear(part, weight.to(device), torch.float32)

    step = run(0, 150)
    for first, count in ((7, 1), (7, 17), (0, 40), (5, 70)):
        assert torch.equal(run(first, count), step[first : first + count]), (first, count)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "width", "depth"),
    [
        (1, 136, 1536),
        (16, 200, 256),
        (40, 136, 1536),
        (150, 136, 1536),
        (150, 136, 6144),
        (150, 200, 1024),
        (180, 2048, 2048),
        (200, 200, 256),
        (1000, 136, 1536),
    ],
)
def test_hopper_forms_have_the_plain_forms_bits(rows: int, width: int, depth: int) -> None:
    weight = QuantWeight(*(t.cuda() for t in quantise_weight(outlier_weight(width, depth))))
    x = QuantRows(*(t.cuda() for t in quantise(outlier_rows(rows, depth))))
    want = launch.linear(x, weight, torch.float32).bfloat16()  # fp32 is the plain form's
    chunks, got = launch.plan(width, depth, True).chunks, torch.empty_like(want)
    if rows <= hopper_few.MOST_ROWS:
        hopper_few.linear(*x, *weight, launch.workspace(x.values.device), got, chunks)
    else:
        hopper.linear(*x, *weight, got, chunks)
        if rows <= hopper_mid.TILE:
            assert torch.equal(want, got)
            hopper_mid.linear(*x, *weight, launch.workspace(x.values.device), got, chunks)
    assert torch.equal(want, got)


def test_programs_that_wait_for_each_other_run_at_once() -> None:
    room, meta = 4 << 20, torch.device("meta")
    assert hopper_mid.form(192, 2624, 6144, 6, room, meta) == (64, 3)
    assert hopper_mid.form(64, 2624, 6144, 6, room, meta) == (64, 3)
    assert hopper_mid.form(192, 2048, 2048, 4, room, meta) == (32, 1)
    assert hopper_mid.form(192, 512, 6144, 4, room, meta) == (32, 4)
    for rows, width, depth in ((64, 2048, 2048), (193, 2048, 2048), (192, 8704, 2048)):
        assert hopper_mid.form(rows, width, depth, 1, room, meta) == (0, 0)
    for width in (136, 512, 2048, 4096, 6144):
        for chunks in (1, 4, 6, 8):
            columns, ways = hopper_mid.form(192, width, 6144, chunks, room, meta)
            tiles = -(-width // columns)
            assert tiles * ways <= 132
            assert ways == 1 or tiles * 192 * columns * chunks <= room


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "width", "depth"), [(150, 200, 768), (200, 328, 448)])
def test_hopper_head_has_the_plain_forms_bits(rows: int, width: int, depth: int) -> None:
    weight, x = outlier_weight(width, depth).bfloat16().cuda(), outlier_rows(rows, depth).cuda()
    got = torch.empty(rows, width, device="cuda")
    hopper_head.linear(x, weight, got)
    shape = launch.plan(width, depth, False)._replace(chunks=1)  # whole sums, as a head's are
    want = torch.empty_like(got)
    launch._many(x, x, weight, weight, want, shape, False)
    assert torch.equal(want, got)


def test_quantised_weights_come_back_within_an_e4m3_step() -> None:
    dense = outlier_weight(200, 256)
    blocks = torch.nn.functional.pad(dense, (0, 0, 0, 56)).view(2, 128, 2, 128).abs().amax((1, 3))
    error = (dequantise_weight(quantise_weight(dense)) - dense).abs()
    bound = blocks.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1) / 28 + 1e-9
    assert (error <= bound).all()  # steps are 32 / 448 at most, the error half of that


def test_rows_are_quantised_when_they_come_in_bf16() -> None:
    weight, x = quantise_weight(outlier_weight(40, 256)), outlier_rows(3, 256)
    want = reference.quant_linear(quantise(x), weight).bfloat16()
    assert torch.equal(linear(x, weight), want)


def test_unserved_dimensions_are_named() -> None:
    assert launch.unserved(6144, torch.bfloat16, scaled=True) == {}
    assert launch.unserved(192, torch.bfloat16, scaled=True) == {"input width": 192}
    wrong = launch.unserved(100, torch.float64)
    with pytest.raises(UnservedShape, match=r"linear: .*input width=100, dtype=torch\.float64"):
        use_kernel("linear", "cuda", wrong)
    allow_reference(True)
    try:
        assert not use_kernel("linear", "cuda", wrong)
    finally:
        allow_reference(False)
