# SPDX-License-Identifier: Apache-2.0
"""The fused block-fp8 FFN has the bits of the separate kernels, whatever the tiles and the rows."""

from __future__ import annotations

import pytest
import torch

from glmserve.kernels.experts import fused_launch, launch, reference, stream_launch
from glmserve.kernels.experts.combining import combine
from glmserve.kernels.experts.pairs import MANY_ROWS
from glmserve.kernels.linear import QuantWeight, quantise_weight
from glmserve.kernels.linear import launch as linear_launch
from glmserve.kernels.linear.reference import quant_linear
from glmserve.kernels.quantise import launch as quantise_launch
from glmserve.kernels.swiglu import launch as swiglu_launch
from glmserve.kernels.swiglu.reference import swiglu
from tests.kernels.test_experts import choices, make_weight, to_device


class Layer:
    """Routed experts [first, first + local) and a slice of a shared one, hidden size `depth`."""

    def __init__(self, device: torch.device, local: int, inner: int, shared: int, depth: int):
        self.cpu = (
            make_weight("fp8", local, 2 * inner, depth),
            make_weight("fp8", local, depth, inner),
            quantise_weight(torch.randn(2 * shared, depth) * depth**-0.5),
            quantise_weight(torch.randn(depth, shared) * shared**-0.5),
        )
        self.weights = [to_device(w, device) for w in self.cpu]
        self.device, self.local = device, local

    def fused(self, x, ids, shares, first=0, block_m=None):  # type: ignore[no-untyped-def]
        x, ids, shares = (t.contiguous().to(self.device) for t in (x, ids, shares))
        block_m = block_m or fused_launch.block_rows(len(x), tuple(self.weights))
        pairs = launch.sort_pairs(ids, first, self.local, block_m)
        rows = quantise_launch.quantise(x)
        up, down, *shared = self.weights
        return fused_launch.experts(rows, shares, pairs, up, down, tuple(shared))

    def separate(self, x, ids, shares, first=0):  # type: ignore[no-untyped-def]
        x, ids, shares = (t.contiguous().to(self.device) for t in (x, ids, shares))
        up, down, shared_up, shared_down = self.weights
        rows = quantise_launch.quantise(x)
        hidden = linear_launch.linear(rows, shared_up, torch.bfloat16)
        inside = swiglu_launch.swiglu_quantised(hidden)
        shared = linear_launch.linear(inside, shared_down, torch.bfloat16)
        pairs = launch.sort_pairs(ids, first, self.local, MANY_ROWS)
        hidden = launch.grouped_linear(rows, up, pairs, ids.shape[1])
        inside = swiglu_launch.swiglu_parts_quantised(hidden, pairs.offsets[-1:])
        return combine(launch.grouped_linear(inside, down, pairs, 0), pairs, shares, shared)

    def reference(self, x, ids, shares, first=0):  # type: ignore[no-untyped-def]
        up, down, shared_up, shared_down = self.cpu
        assert isinstance(shared_up, QuantWeight)
        assert isinstance(shared_down, QuantWeight)
        inside = swiglu(quant_linear(x, shared_up).to(x.dtype))
        shared = quant_linear(inside, shared_down).to(x.dtype)
        return reference.experts(x, ids, shares, up, down, first, shared)


def make_rows(rows: int, experts: int, top_k: int, depth: int) -> tuple[torch.Tensor, ...]:
    x = torch.randn(rows, depth)
    x[:, 3] *= 40
    return x.bfloat16(), choices(rows, experts, top_k), torch.rand(rows, top_k)


@pytest.mark.parametrize("split_pairs", [0, 1 << 20], ids=["whole", "split"])
@pytest.mark.parametrize(
    ("rows", "experts", "local", "first", "inner", "block_m"),
    [(3, 12, 4, 4, 128, 16), (20, 5, 5, 0, 256, 16), (21, 4, 3, 1, 128, 32), (2, 9, 2, 7, 128, 16)],
    ids=["some whole experts", "slices of all", "tall tiles", "hardly any local"],
)
def test_has_the_bits_of_separate_kernels(
    device: torch.device,
    rows: int,
    experts: int,
    local: int,
    first: int,
    inner: int,
    block_m: int,
    split_pairs: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fused_launch, "_SPLIT_PAIRS", split_pairs)
    monkeypatch.setattr(fused_launch, "_THIN_PAIRS", split_pairs)
    layer = Layer(device, local, inner, 128, 256)
    inputs = make_rows(rows, experts, 3, 256)
    got = layer.fused(*inputs, first, block_m)
    assert torch.equal(got, layer.separate(*inputs, first))
    assert not linear_launch.workspace(got.device)[1].any()


def test_is_as_near_the_reference_as_the_whole_block_must_be(device: torch.device) -> None:
    layer = Layer(device, 3, 256, 128, 256)
    inputs = make_rows(20, 6, 3, 256)
    got, want = layer.fused(*inputs, 2).cpu().float(), layer.reference(*inputs, 2).float()
    # Not by elements: an activation beside a rounding step of fp8 may fall to the other side, and
    # an outlier makes that visible in every column of its row.
    assert float((got - want).norm() / want.norm()) < 2e-2


@pytest.mark.parametrize("split_pairs", [0, 64], ids=["combined apart", "combined in place"])
def test_no_local_expert_leaves_the_shared_part(
    device: torch.device, split_pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_launch, "_SPLIT_PAIRS", split_pairs)
    monkeypatch.setattr(fused_launch, "_THIN_PAIRS", split_pairs)
    layer = Layer(device, 2, 128, 256, 384)
    inputs = make_rows(5, 6, 2, 384)
    got = layer.fused(*inputs, first=6)
    assert torch.equal(got, layer.separate(*inputs, first=6))


def test_a_row_of_long_sums_has_the_same_bits_in_every_form(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = Layer(device, 1, 128, 128, 4096)  # four chunks a sum
    x, ids, shares = make_rows(18, 1, 1, 4096)
    alone = layer.fused(x[17:], ids[17:], shares[17:])
    for form, block_m, split_pairs in (("whole", 16, 0), ("split", 16, 1 << 20), ("tall", 32, 0)):
        monkeypatch.setattr(fused_launch, "_SPLIT_PAIRS", split_pairs)
        monkeypatch.setattr(fused_launch, "_THIN_PAIRS", split_pairs)
        got = layer.fused(x, ids, shares, block_m=block_m)[17:]
        assert torch.equal(got, alone), form


@pytest.mark.gpu
@pytest.mark.parametrize("skewed", [False, True], ids=["even", "skewed"])
@pytest.mark.parametrize("rows", [9, 16, 17, 32, 33, 190, 256, 300, 513, 700, 1536])
def test_one_launch_has_the_bits_of_separate_kernels(rows: int, skewed: bool) -> None:
    layer = Layer(torch.device("cuda"), 6, 1024, 256, 6144)
    assert fused_launch.streams(rows, tuple(layer.weights))
    x, ids, shares = make_rows(rows, 20, 3, 6144)
    if skewed:  # every row to two experts of this rank: many tiles each
        ids = torch.tensor([3, 8, 12]).expand(rows, 3)
    inputs = x, ids, shares
    want = layer.separate(*inputs, first=7)
    for _ in range(3):  # counters are put back
        assert torch.equal(layer.fused(*inputs, first=7), want)
    assert not any(c.any() for c in stream_launch.counters(layer.device)[:3])
    alone = [t[-1:] for t in inputs]
    assert torch.equal(layer.fused(*alone, first=7), want[-1:])
    x, ids, shares = (t.contiguous().to(layer.device) for t in inputs)
    given = torch.randn(rows, 6144, device="cuda").bfloat16()
    up, down = layer.weights[:2]
    got = launch.experts(x, ids, shares, up, down, 30, given)
    assert torch.equal(got, given)  # no expert of these rows is here


def test_only_block_fp8_layers_of_whole_groups_are_served(device: torch.device) -> None:
    serves, weights = fused_launch.serves, tuple(Layer(device, 2, 128, 128, 256).weights)
    assert serves(1, torch.bfloat16, weights)
    assert serves(1, torch.bfloat16, weights[:2])
    assert not serves(fused_launch.MOST_ROWS + 1, torch.bfloat16, weights)
    assert not serves(1, torch.float32, weights)
    plain, down = make_weight("bf16", 2, 256, 256), weights[3]
    assert not serves(1, torch.bfloat16, (plain, *weights[1:]))
    assert isinstance(down, QuantWeight)
    odd = QuantWeight(down.values[:, :64], down.scales)
    assert not serves(1, torch.bfloat16, (*weights[:3], odd))


@pytest.mark.parametrize(
    ("rows", "depth", "inner", "shared", "served"),
    [
        (9, 6144, 2048, 256, True),
        (8, 6144, 2048, 256, False),  # small items spread better
        (9, 6144, 256, 256, False),  # slices of experts
        (9, 4096, 1024, 256, False),  # `linear` sums such a shared slice in eight chunks, not four
        (9, 6144, 2048, 384, False),
    ],
)
def test_one_launch_takes_long_items_whose_sums_are_cut_alike(
    rows: int, depth: int, inner: int, shared: int, served: bool
) -> None:
    weights = tuple(
        QuantWeight(
            torch.empty(*lead, n, k, dtype=torch.float8_e4m3fn, device="meta"),
            torch.empty(*lead, n // 128, k // 128, device="meta"),
        )
        for lead, n, k in (
            ((6,), 2 * inner, depth), ((6,), depth, inner), ((), 2 * shared, depth),
            ((), depth, shared),
        )
    )  # fmt: skip
    assert fused_launch.streams(rows, weights) == served
