# SPDX-License-Identifier: Apache-2.0
"""Grouped experts: sorting, both layouts, all weight kinds, and bits alone and in a step."""

from __future__ import annotations

import pytest
import torch

from glmserve.kernels.experts import ExpertWeight, Int4Weight, launch, reference
from glmserve.kernels.experts.pairs import MANY_ROWS
from glmserve.kernels.linear import QuantWeight, quantise_weight
from glmserve.kernels.quantise import QuantRows, quantise
from tests.tolerances import assert_close

KINDS = ["bf16", "fp8", "int4 g32", "int4 g128"]


def choices(rows: int, experts: int, top_k: int) -> torch.Tensor:
    """Ascending ids, no expert twice in a row of the result."""
    return torch.stack([torch.randperm(experts)[:top_k].sort().values for _ in range(rows)])


def make_weight(kind: str, experts: int, width: int, depth: int) -> ExpertWeight:
    dense = torch.randn(experts, width, depth) * depth**-0.5
    dense[:, 5] *= 20
    if kind == "bf16":
        return dense.bfloat16()
    if kind == "fp8":
        parts = [quantise_weight(one) for one in dense]
        return QuantWeight(
            torch.stack([p.values for p in parts]), torch.stack([p.scales for p in parts])
        )
    group = int(kind.rpartition("g")[2])
    nibbles = torch.randint(0, 16, (experts, width, depth))
    scales = (torch.rand(experts, width, depth // group) + 0.5).bfloat16() * depth**-0.5 / 4
    zeros = None
    if group == 32:
        points = torch.randint(0, 16, (experts, depth // group, width))
        zeros = torch.stack([reference.pack_nibbles(p).t().contiguous() for p in points])
    packed = torch.stack([reference.pack_nibbles(n) for n in nibbles])
    return Int4Weight(packed, scales.bfloat16(), zeros)


def to_device(weight: ExpertWeight, device: torch.device) -> ExpertWeight:
    if isinstance(weight, torch.Tensor):
        return weight.to(device)
    return type(weight)(*(None if t is None else t.to(device) for t in weight))


@pytest.mark.parametrize(
    ("rows", "experts", "local", "first"), [(3, 12, 4, 4), (40, 16, 16, 0), (300, 20, 7, 9)]
)
def test_pairs_are_sorted_by_expert_and_cut_into_tiles(
    device: torch.device, rows: int, experts: int, local: int, first: int
) -> None:
    ids = choices(rows, experts, 8)
    pairs = launch.sort_pairs(ids.to(device), first, local, 16)
    flat = (ids.flatten() - first).tolist()
    want = [i for e in range(local) for i, held in enumerate(flat) if held == e]
    assert pairs.order[: len(want)].tolist() == want
    assert [p for p in pairs.place.tolist() if p >= 0] == [
        want.index(i) for i, held in enumerate(flat) if 0 <= held < local
    ]
    bounds = pairs.offsets.tolist()
    assert bounds[-1] == len(want)
    tiles = [
        (e, begin, min(begin + pairs.block_m, bounds[e + 1]))
        for e in range(local)
        for begin in range(bounds[e], bounds[e + 1], pairs.block_m)
    ]
    count = int(pairs.tile_count)
    columns = (pairs.tile_expert, pairs.tile_begin, pairs.tile_end)
    assert list(zip(*(c[:count].tolist() for c in columns), strict=True)) == tiles
    assert (pairs.tile_expert[count:] == -1).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "experts", "local", "first", "inner"),
    [(3, 12, 4, 4, 128), (20, 5, 5, 0, 256)],
    ids=["some whole experts", "slices of all"],
)
def test_matches_the_reference(
    device: torch.device, kind: str, rows: int, experts: int, local: int, first: int, inner: int
) -> None:
    depth = 256
    x, shared = torch.randn(rows, depth).bfloat16(), torch.randn(rows, depth).bfloat16()
    ids, shares = choices(rows, experts, 3), torch.rand(rows, 3)
    up = make_weight(kind, local, 2 * inner, depth)
    down = make_weight(kind, local, depth, inner)
    want = reference.experts(x, ids, shares, up, down, first, shared)
    got = launch.experts(
        *(t.to(device) for t in (x, ids, shares)),
        to_device(up, device),
        to_device(down, device),
        first,
        shared.to(device),
    )
    assert_close("experts", want, got, "operator_quantised")


def test_no_local_expert_leaves_the_shared_part(device: torch.device) -> None:
    x, shared = torch.randn(2, 128).bfloat16(), torch.randn(2, 128).bfloat16()
    up, down = make_weight("bf16", 2, 256, 128), make_weight("bf16", 2, 128, 128)
    assert isinstance(up, torch.Tensor)
    assert isinstance(down, torch.Tensor)
    ids, shares = torch.tensor([[0, 1], [0, 5]]), torch.rand(2, 2)
    inputs = [t.to(device) for t in (x, ids, shares, up, down)]
    got = launch.experts(*inputs, 8, shared.to(device))  # type: ignore[call-arg]
    assert torch.equal(got.cpu(), shared)


@pytest.mark.parametrize("kind", ["bf16", "int4 g32"])
@pytest.mark.parametrize("block_m", [16, 64])
def test_a_row_has_the_same_bits_in_every_tile_height(
    device: torch.device, kind: str, block_m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, shared = torch.randn(9, 256).bfloat16(), torch.randn(9, 256).bfloat16()
    ids, shares = choices(9, 4, 2), torch.rand(9, 2)
    up = to_device(make_weight(kind, 4, 256, 256), device)
    down = to_device(make_weight(kind, 4, 256, 128), device)

    def run(rows: slice) -> torch.Tensor:
        x_, ids_, shares_, shared_ = (
            t[rows].contiguous().to(device) for t in (x, ids, shares, shared)
        )
        return launch.experts(x_, ids_, shares_, up, down, 0, shared_)

    alone = run(slice(4, 5))
    monkeypatch.setattr(launch, "_block_rows", lambda rows: block_m)
    assert torch.equal(run(slice(0, 9))[4:5], alone)


@pytest.mark.parametrize(
    ("block_m", "split_pairs"), [(16, 0), (16, 1 << 20), (64, 0)], ids=["whole", "split", "many"]
)
def test_long_sums_have_the_same_bits_split_and_whole(
    device: torch.device, block_m: int, split_pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = to_device(make_weight("bf16", 1, 128, 4096), device)
    assert isinstance(weight, torch.Tensor)
    x = torch.randn(2, 4096).bfloat16().to(device)
    ids = torch.zeros(2, 1, dtype=torch.int64, device=device)

    def run(tile: int) -> torch.Tensor:
        parts = launch.grouped_linear(x, weight, launch.sort_pairs(ids, 0, 1, tile), 1)
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        return total.bfloat16()

    usual = run(16)
    monkeypatch.setattr(launch, "_SPLIT_PAIRS", split_pairs)
    assert torch.equal(run(block_m), usual)


def test_nibbles_are_packed_from_the_low_bits_up() -> None:
    nibbles = torch.arange(16).view(1, 16)
    words = reference.pack_nibbles(nibbles)
    assert [word & 0xFFFFFFFF for word in words[0].tolist()] == [0x76543210, 0xFEDCBA98]
    assert torch.equal(reference.unpack_nibbles(words), nibbles)


def test_int4_weights_follow_the_zero_points_along_the_rows() -> None:
    nibbles, points = torch.randint(0, 16, (16, 64)), torch.randint(0, 16, (2, 16))
    weight = Int4Weight(
        reference.pack_nibbles(nibbles)[None],
        torch.full((1, 16, 2), 0.5).bfloat16(),
        reference.pack_nibbles(points).t().contiguous()[None],
    )
    want = (nibbles - points.t().repeat_interleave(32, 1)) * 0.5
    assert torch.equal(reference.dequantise_int4(weight, 0).float(), want)


def test_unserved_dimensions_are_named() -> None:
    x = torch.zeros(1, 256).bfloat16()
    plain = make_weight("bf16", 1, 256, 256)
    assert launch.unserved(x, plain, plain) == {}
    odd = torch.zeros(1, 256, 100).bfloat16()
    assert launch.unserved(x.double(), plain, odd) == {
        "dtype": torch.float64,
        "down input width": 100,
    }
    assert launch.unserved(x, plain, make_weight("fp8", 1, 256, 256)) == {
        "gate_up and down": ("Tensor", "QuantWeight")
    }


@pytest.mark.gpu
@pytest.mark.parametrize("top_k", [2, 0])
@pytest.mark.parametrize("depth", [4096, 640, 384, 128])
def test_hopper_form_has_the_plain_forms_bits(depth: int, top_k: int) -> None:
    weight = to_device(make_weight("fp8", 10, 200, depth), torch.device("cuda"))
    assert isinstance(weight, QuantWeight)
    held = torch.tensor([300, 0, 1, 63, 64, 65, 127, 128, 129, 257, 40])  # the last are not here
    ids = torch.arange(11).repeat_interleave(held)[torch.randperm(int(held.sum()))].cuda()
    ids = ids.view(-1, 2)
    x = torch.randn(len(ids) if top_k else ids.numel(), depth).bfloat16()
    rows = QuantRows(*(t.cuda() for t in quantise(x)))

    def run(tile: int) -> torch.Tensor:
        pairs = launch.sort_pairs(ids, 0, 10, tile)
        return launch.grouped_linear(rows, weight, pairs, top_k)[0, : int(pairs.offsets[-1])]

    assert torch.equal(run(launch.many_rows(ids)), run(MANY_ROWS))
