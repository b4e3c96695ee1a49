# SPDX-License-Identifier: Apache-2.0
"""fp8 cache rows in plain torch: how they are laid out, written and read. Kernels match these bits.

Latent row of R values, R + 4 R / 128 + 128 B: the e4m3 values, fp32 scales (one for 128 values), 64
bf16 roped key values. R is a multiple of 128; GLM's 512 take 656 B. Kernels read 128, 256 and 512.
Index page, 64 slots of 132 B: the 64 keys of 128 e4m3 values first, then their 64 fp32 scales. As
a tensor it is uint8 [slots, 132], contiguous; a slot's own 132 bytes are not where its key lies.
"""

from __future__ import annotations

import torch

E4M3_MAX = 448.0
ROPE_DIM, LATENT_GROUP = 64, 128
INDEX_DIM, INDEX_PAGE = 128, 64
INDEX_ROW_BYTES = INDEX_DIM + 4
# A smaller group maximum counts as this one, so that no scale is zero or subnormal.
SMALLEST_AMAX = 1e-4


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Ties to even, saturating at 448."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def scale_of(x: torch.Tensor, power_of_two: bool) -> torch.Tensor:
    """Scale of each last-dimension group of fp32 x: amax / 448, or the next power of two."""
    scale = x.abs().amax(-1).clamp_min(SMALLEST_AMAX) / E4M3_MAX
    return torch.exp2(torch.ceil(torch.log2(scale.double()))).float() if power_of_two else scale


def latent_row_bytes(latent: int) -> int:
    """Bytes of a row with `latent` values."""
    return latent + 4 * latent // LATENT_GROUP + 2 * ROPE_DIM


def pack_latent_rows(latent: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """fp32 latents [n, R] and roped keys [n, 64] -> uint8 [n, latent_row_bytes(R)]."""
    groups = latent.float().view(len(latent), -1, LATENT_GROUP)
    scale = scale_of(groups, power_of_two=False)
    values = to_e4m3(groups / scale[..., None]).view(torch.uint8).flatten(1)
    key = rope.bfloat16().contiguous().view(torch.uint8)
    return torch.cat((values, scale.view(torch.uint8), key), dim=1)


def unpack_latent_rows(rows: torch.Tensor) -> torch.Tensor:
    """uint8 [n, latent_row_bytes(R)] -> fp32 [n, R + 64]."""
    latent = (rows.shape[1] - 2 * ROPE_DIM) * LATENT_GROUP // (LATENT_GROUP + 4)
    values = rows[:, :latent].contiguous().view(torch.float8_e4m3fn).float()
    scale = rows[:, latent : -2 * ROPE_DIM].contiguous().view(torch.float32)
    rope = rows[:, -2 * ROPE_DIM :].contiguous().view(torch.bfloat16).float()
    return torch.cat((values * scale.repeat_interleave(LATENT_GROUP, 1), rope), dim=1)


def quantise_index(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [..., 128] -> e4m3 [..., 128] and power-of-two scales [...], one for 128 values."""
    scale = scale_of(x, power_of_two=True)
    return to_e4m3(x / scale[..., None]), scale


def _index_places(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of an index cache: keys uint8 [pages, 64, 128] and scales fp32 [pages, 64]."""
    pages = cache.view(-1, INDEX_PAGE * INDEX_ROW_BYTES)
    keys = pages[:, : INDEX_PAGE * INDEX_DIM].unflatten(1, (INDEX_PAGE, INDEX_DIM))
    return keys, pages.view(torch.float32)[:, INDEX_PAGE * INDEX_DIM // 4 :]


def write_index_rows(cache: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor) -> None:
    """Quantises fp32 keys [R, 128] into slots [R] of the cache uint8 [slots, 132]."""
    values, scale = quantise_index(keys)
    places, scales = _index_places(cache)
    places[slots // INDEX_PAGE, slots % INDEX_PAGE] = values.view(torch.uint8)
    scales[slots // INDEX_PAGE, slots % INDEX_PAGE] = scale


def read_index_pages(cache: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """fp32 keys [..., 64, 128] of physical pages [...]."""
    places, scales = _index_places(cache)
    values = places[pages].view(torch.float8_e4m3fn).float()
    return values * scales[pages][..., None]
