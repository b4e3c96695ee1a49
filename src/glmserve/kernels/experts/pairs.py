# SPDX-License-Identifier: Apache-2.0
"""Sorted (row, expert) pairs: what they are, room for them, and the rule of K chunks over them."""

from __future__ import annotations

from typing import NamedTuple

import torch

FEW_ROWS, MANY_ROWS = 16, 64  # rows of a tile of the few-row and the many-row kernels


class SortedPairs(NamedTuple):
    """Pairs by expert and the tiles over them; see `sorting.sort_pairs`."""

    order: torch.Tensor
    place: torch.Tensor
    offsets: torch.Tensor
    tile_expert: torch.Tensor
    tile_begin: torch.Tensor
    tile_end: torch.Tensor
    tile_count: torch.Tensor
    block_m: int
    max_tiles: int


def empty_pairs(pairs: int, local: int, block_m: int, device: torch.device) -> SortedPairs:
    """Room for `pairs` pairs of `local` experts in tiles of block_m rows."""
    max_tiles = min(pairs, local) + pairs // block_m
    sizes = [pairs, pairs, local + 1, max_tiles, max_tiles, max_tiles, 1]
    aligned = [-(-size // 4) * 4 for size in sizes]  # 16 bytes: one specialisation of the kernels
    ints = torch.empty(sum(aligned), dtype=torch.int32, device=device)
    parts = [part[:size] for part, size in zip(ints.split(aligned), sizes, strict=True)]
    order, place, offsets, tile_expert, tile_begin, tile_end, tile_count = parts
    return SortedPairs(
        order, place, offsets, tile_expert, tile_begin, tile_end, tile_count, block_m, max_tiles
    )


def long_sum_chunks(depth: int, block_k: int) -> int:
    """K chunks of an expert's product. `linear`'s plan knows one weight; here many are in flight,
    so only the long sum is cut."""
    return 4 if depth >= 4096 and (depth // block_k) % 4 == 0 else 1
