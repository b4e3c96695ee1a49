# SPDX-License-Identifier: Apache-2.0
"""Norms, RoPE and cache writes against the reference; fp8 rows against the plain packing."""

from __future__ import annotations

import pytest
import torch

from glmserve.kernels.latent_inputs import reference
from glmserve.kernels.latent_inputs.kernel import latent_inputs, unserved
from glmserve.kernels.latent_inputs.reference import IndexKeyNorm
from glmserve.kernels.quant import latent_row_bytes, read_index_pages, unpack_latent_rows
from glmserve.kernels.quantise.reference import quantise
from glmserve.kernels.residual_norm import Normed
from glmserve.kernels.rope.reference import rope_table

SLOTS = 128


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
@pytest.mark.parametrize("index", [True, False], ids=["with index keys", "without"])
@pytest.mark.parametrize(("q", "latent"), [(2048, 512), (128, 256)])
def test_matches_the_reference(
    device: torch.device, fp8: bool, index: bool, q: int, latent: int
) -> None:
    rows = 5
    projected = torch.randn(rows, q + latent + 64 + 160, device=device)
    projected[1] *= 40
    projected[2, q : q + latent] = 0  # the smallest scale
    projected[3, q + 2] = 300
    projected = projected.bfloat16()
    q_norm = (1 + 0.1 * torch.randn(q, device=device)).bfloat16()
    kv_norm = (1 + 0.1 * torch.randn(latent, device=device)).bfloat16()
    norm = IndexKeyNorm(
        (1 + 0.1 * torch.randn(128, device=device)).bfloat16(),
        (0.1 * torch.randn(128, device=device)).bfloat16(),
    )
    rope = rope_table(torch.tensor([0, 5, 77, 4000, 9], device=device), 64, 8e6, torch.float32)
    slots = torch.tensor([70, 3, 127, 64, 0], device=device)
    # The wide reference says what the rows should hold before they are rounded or quantised.
    wide_cache = torch.zeros(SLOTS, latent + 64, device=device)
    wide_index = torch.zeros(SLOTS, 128, device=device) if index else None
    wide_norm = IndexKeyNorm(norm.weight.float(), norm.bias.float()) if index else None
    want = reference.latent_inputs(
        projected.float(), q_norm.float(), kv_norm.float(), rope, slots, wide_cache, wide_index,
        wide_norm, 1e-5,
    )  # fmt: skip
    if fp8:
        width = latent_row_bytes(latent)
        cache = torch.zeros(SLOTS, width, dtype=torch.uint8, device=device)
        keys = torch.zeros(SLOTS, 132, dtype=torch.uint8, device=device)
    else:
        cache = torch.zeros(SLOTS, latent + 64, dtype=torch.bfloat16, device=device)
        keys = torch.zeros(SLOTS, 128, dtype=torch.bfloat16, device=device)
    got, got8 = latent_inputs(
        projected, q_norm, kv_norm, rope, slots, cache, keys if index else None,
        norm if index else None, 1e-5, quantised=index,
    )  # fmt: skip
    assert (got8 is not None) == index
    if got8 is not None:
        assert all(torch.equal(a, b) for a, b in zip(got8, quantise(got), strict=True))
    assert (got.float() - want).norm() < 3e-3 * want.norm()
    stored = unpack_latent_rows(cache) if fp8 else cache.float()
    close = 0.05 if fp8 else 3e-3
    for row, slot in enumerate(slots.tolist()):
        for part in (slice(0, latent), slice(latent, latent + 64)):
            error = (stored[slot, part] - wide_cache[slot, part]).norm()
            assert error <= close * wide_cache[slot, part].norm() + 1e-6, (row, part)
    untouched = torch.ones(SLOTS, dtype=torch.bool, device=device)
    untouched[slots] = False
    assert not cache[untouched].any()
    if wide_index is not None:
        if fp8:
            pages = torch.arange(SLOTS // 64, device=device)
            found = read_index_pages(keys, pages).flatten(0, 1)
        else:
            found = keys.float()
        assert (found - wide_index).norm() < close * wide_index.norm()
        assert not found[untouched].any()
    else:
        assert not keys.any()


def test_fp8_scales_are_those_of_the_formats(device: torch.device) -> None:
    projected = torch.randn(1, 2048 + 576 + 128, device=device).bfloat16()
    ones, rope = torch.ones(2048, device=device).bfloat16(), torch.zeros(1, 32, 2, device=device)
    rope[..., 0] = 1
    cache = torch.zeros(64, 656, dtype=torch.uint8, device=device)
    keys = torch.zeros(64, 132, dtype=torch.uint8, device=device)
    norm = IndexKeyNorm(ones[:128], torch.zeros_like(ones[:128]))
    slots = torch.tensor([9], device=device)
    latent_inputs(projected, ones, ones[:512], rope, slots, cache, keys, norm, 1e-5)
    values = cache[9, :512].view(torch.float8_e4m3fn).float().view(4, 128)
    assert (values.abs().amax(1) == 448).all()  # amax / 448: the largest value is the largest code
    scale = keys.view(torch.float32)[:, :].flatten()[2048 + 9]
    mantissa, _ = torch.frexp(scale)
    assert mantissa == 0.5  # a power of two
    top = keys.flatten()[9 * 128 : 10 * 128].view(torch.float8_e4m3fn).float().abs().max()
    assert 224 <= top <= 448


def test_dimensions_that_the_kernel_does_not_serve_are_named() -> None:
    cache, rope = torch.empty(64, 40), torch.empty(1, 4, 2)
    wrong = unserved(
        torch.empty(1, 80), torch.empty(24), torch.empty(32), rope, cache, torch.empty(64, 16)
    )
    assert set(wrong) == {"q_lora_rank", "latent row", "dtype", "cache row", "index row"}


def test_an_index_key_projected_apart_gives_the_same_rows(device: torch.device) -> None:
    """Block-fp8 latents and bf16 index keys are two products."""
    x = torch.randn(3, 2048 + 576 + 160, device=device).bfloat16()
    ones = torch.ones(2048, dtype=torch.bfloat16, device=device)
    norm = IndexKeyNorm(ones[:128], ones[:128] * 0)
    rope = rope_table(torch.tensor([1, 2, 3], device=device), 64, 8e6, torch.float32)
    slots = torch.tensor([7, 0, 70], device=device)
    pairs = []
    latents, index = x[:, :2624].contiguous(), x[:, 2624:]
    # Halves of the numbers and their rest add up exactly; the rounding to bf16 is at the end.
    halves = torch.stack((index.float() / 2, index.float() / 4, index.float() / 4))
    for parts in ((x, None), (latents, index[None]), (latents, halves)):
        for run in (latent_inputs, reference.latent_inputs):
            cache, keys = (
                torch.zeros(SLOTS, n, dtype=torch.uint8, device=device) for n in (656, 132)
            )
            q = run(parts[0], ones, ones[:512], rope, slots, cache, keys, norm, 1e-5, parts[1])
            pairs.append((q.rows if isinstance(q, Normed) else q, cache, keys))
    for pair in (pairs[2:4], pairs[4:]):
        for got, want in zip(pairs[:2], pair, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
