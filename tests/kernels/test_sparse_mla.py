# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA kernels against the reference on odd selections, permuted slots and outlier rows."""

from __future__ import annotations

import pytest
import torch

from glmserve.kernels.quant import pack_latent_rows, unpack_latent_rows
from glmserve.kernels.sparse_mla import reference
from glmserve.kernels.sparse_mla.joining import MANY_ROWS, join
from glmserve.kernels.sparse_mla.launch import sparse_mla, unserved

SCALE = 256**-0.5
Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # sums, reference, total


def make(
    device: torch.device, fp8: bool, heads: int, counts: list[int], k: int, width: int = 512
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """query, cache, slots and the cache's values in fp32; row r uses counts[r] of its k places."""
    slots = 700
    latent = torch.randn(slots, width) * torch.exp(torch.randn(slots, 1))
    latent[::37] *= 50
    latent[5] = 0
    rope = torch.randn(slots, 64).bfloat16()
    if fp8:
        cache = pack_latent_rows(latent, rope)
        values = unpack_latent_rows(cache)
    else:
        cache = torch.cat((latent.bfloat16(), rope), 1)
        values = cache.float()
    query = torch.randn(len(counts), heads, width + 64)
    query[:, ::3] *= 0.1
    query[0, 0, 7] = 30.0
    picks = torch.full((len(counts), k), -1, dtype=torch.int32)
    for row, count in enumerate(counts):
        picks[row, :count] = torch.randperm(slots)[:count].int()
    to = [x.to(device) for x in (query.bfloat16(), cache, picks, values)]
    return to[0], to[1], to[2], to[3]


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want).norm() / want.norm())


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
@pytest.mark.parametrize(
    ("heads", "counts", "k"),
    [(8, [1, 0, 300, 257], 300), (8, [64, 3], 64), (16, [70, 65], 70), (32, [5], 40)],
    ids=["8 heads, leaves of all sizes", "8 heads, one leaf", "16 heads", "32 heads in two blocks"],
)
def test_matches_the_reference(
    device: torch.device, fp8: bool, heads: int, counts: list[int], k: int
) -> None:
    query, cache, slots, values = make(device, fp8, heads, counts, k)
    want = reference.sparse_mla(query.float(), values, slots.long(), 512, SCALE)
    got = sparse_mla(query, cache, slots, SCALE)
    assert got.dtype == torch.bfloat16
    for row, count in enumerate(counts):
        if count == 0:
            assert not got[row].any()
        else:
            assert relative(got[row], want[row]) < 5e-3, row


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
@pytest.mark.parametrize(("heads", "latent"), [(8, 256), (2, 256), (32, 128), (1, 512)])
def test_small_models_match_the_reference_alone_and_in_a_batch(
    device: torch.device, fp8: bool, heads: int, latent: int
) -> None:
    query, cache, slots, values = make(device, fp8, heads, [1, 0, 77, 128], 128, latent)
    assert not unserved(query, cache, latent)
    want = reference.sparse_mla(query.float(), values, slots.long(), latent, SCALE)
    got = sparse_mla(query, cache, slots, SCALE)
    assert not got[1].any()
    for row in (0, 2, 3):
        assert relative(got[row], want[row]) < 5e-3, row
        one = slice(row, row + 1)
        alone = sparse_mla(query[one].contiguous(), cache, slots[one].contiguous(), SCALE)
        assert torch.equal(alone[0], got[row])


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(device: torch.device, fp8: bool) -> None:
    query, cache, slots, _ = make(device, fp8, 8, [270, 120], 270)
    together = sparse_mla(query, cache, slots, SCALE)
    for row in range(2):
        one = slice(row, row + 1)
        one_row = query[one].contiguous(), cache, slots[one].contiguous()
        alone = sparse_mla(*one_row, SCALE)
        assert torch.equal(alone[0], together[row])


@pytest.mark.gpu
def test_a_row_has_the_same_bits_however_many_tiles_a_program_takes(device: torch.device) -> None:
    counts = [600, 0, 64, 1] * 10  # tiles one by one, chains of four, pairs of chains
    query, cache, slots, _ = make(device, True, 8, counts, 640)
    together = sparse_mla(query, cache, slots, SCALE)
    for rows in (1, 4, 12):
        got = sparse_mla(query[:rows], cache, slots[:rows], SCALE)
        assert torch.equal(got, together[:rows]), rows


@pytest.mark.gpu
def test_rows_without_a_token_are_zero_among_many(device: torch.device) -> None:
    """Their copies, which nobody waits for in the loop, must not land in what is stored."""
    counts = [0, 1, 0, 640, 0] * (MANY_ROWS // 4)
    query, cache, slots, _ = make(device, True, 8, counts, 640)
    assert len(query) > MANY_ROWS
    empty = torch.tensor(counts, device=device) == 0
    first = sparse_mla(query, cache, slots, SCALE)
    assert bool(first[~empty].isfinite().all())
    for _ in range(200):
        got = sparse_mla(query, cache, slots, SCALE)
        assert not got[empty].any()
        assert torch.equal(got, first)


def test_parts_of_a_row_join_to_the_same_bits_from_tiles_chains_and_pairs(
    device: torch.device,
) -> None:
    rows, tiles = 2, 11
    sums = torch.randn(rows, tiles, 4096)
    reference_point = torch.randint(-5, 5, (rows, tiles, 8)).float()
    total = torch.rand(rows, tiles, 8) + 0.1
    reference_point[1, 6:], total[1, 6:], sums[1, 6:] = -1e30, 0.0, torch.nan  # never written
    place = torch.arange(4096)
    head = ((place >> 9) & 1) * 4 + ((place >> 2) & 3)
    dim = (place >> 10) * 128 + ((place >> 7) & 3) * 32 + ((place >> 4) & 7) * 4 + (place & 3)

    def add(parts: list[Part]) -> Part:
        x, m, t = parts[0]
        x = torch.where(m[:, head] > -1e29, x, 0.0)
        for y, n, u in parts[1:]:
            top = torch.maximum(m, n)
            a, b = torch.exp2(m - top), torch.exp2(n - top)
            y = torch.where(n[:, head] > -1e29, y, 0.0)
            x, m, t = x * a[:, head] + y * b[:, head], top, t * a + u * b
        return x, m, t

    one = [(sums[:, i], reference_point[:, i], total[:, i]) for i in range(tiles)]
    four = [add(one[i : i + 4]) for i in range(0, tiles, 4)]
    eight = [add(four[i : i + 2]) for i in range(0, len(four), 2)]
    eight = [(x.bfloat16().float(), m, t) for x, m, t in eight]
    x, _, t = add(eight)
    want = torch.zeros(rows, 8, 512)
    want[:, head, dim] = x / (256 * t[:, head])
    for parts, size, span in ((one, 1, 256), (four, 4, 256), (eight, 8, 512)):
        kept = torch.stack([p[0] for p in parts], 1)
        sizes = torch.stack([torch.stack(p[1:], 1) for p in parts], 1)
        got = torch.empty(rows, 8, 512, dtype=torch.bfloat16, device=device)
        join[(rows, 4096 // span)](
            kept.to(torch.bfloat16 if size == 8 else torch.float32).to(device), sizes.to(device),
            got, len(parts), TILES=size, SPAN=span, num_warps=span // 128,
        )  # fmt: skip
        assert relative(got.cpu(), want) < 3e-3, size
        if size == 1:
            first = got
        assert torch.equal(got, first), size


def test_outlier_scales_stay_in_f16_range(device: torch.device) -> None:
    query, cache, slots, values = make(device, True, 8, [256], 256)
    scales = cache[:, 512:528].contiguous().view(torch.float32)
    factor = torch.where(torch.arange(len(cache), device=device) % 2 == 0, 1e4, 1e-2)[:, None]
    cache[:, 512:528] = (scales * factor).view(torch.uint8)
    values = unpack_latent_rows(cache)
    query *= 1e-4  # keeps the softmax from being one token's
    want = reference.sparse_mla(query.float(), values, slots.long(), 512, SCALE)
    assert relative(sparse_mla(query, cache, slots, SCALE), want) < 5e-3


def test_dimensions_that_the_kernel_does_not_serve_are_named() -> None:
    query = torch.empty(1, 3, 576, dtype=torch.bfloat16)
    assert unserved(query, torch.empty(64, 656, dtype=torch.uint8), 512) == {"heads": 3}
    wrong = unserved(torch.empty(1, 8, 40), torch.empty(64, 40), 32)
    assert set(wrong) == {"latent row", "query dtype", "cache row"}
