# SPDX-License-Identifier: Apache-2.0
"""Host side of `stream`: what it serves, its tiles, room and counters."""

from __future__ import annotations

from functools import cache

import torch

from ..linear.hopper import PROGRAMS, boxes
from ..linear.launch import plan
from ..linear.reference import QuantWeight
from ..pdl import pdl
from ..quantise.reference import QuantRows
from . import stream
from .combining import combine as combine_parts
from .pairs import SortedPairs, long_sum_chunks
from .taking import take

_FEW = 8  # rows up to which the plain form's smaller items spread better over the card
_LONG = 1024  # columns of an expert from which the stream, not an item's end, is what lasts
_AS_THEY_ARE = 32  # rows up to which tiles take them as they are, and the last program adds up
_TILES, _ITEMS, _COLUMNS = 2048, 512, 512  # counters of a device
_STAGES = {16: 6, 32: 5, 64: 4}  # by the columns of a tile


def height(rows: int) -> int:
    """Columns of a tile: all rows where they are few, later those of most experts: GLM has 256
    experts, 8 a row, so R rows give one R / 32."""
    if rows <= 256:
        return 32 if 16 < rows <= _AS_THEY_ARE else 16
    return 32 if rows <= 512 else 64


def serves(
    rows: int, gate_up: QuantWeight, down: QuantWeight,
    shared: tuple[QuantWeight, QuantWeight] | None,
) -> bool:  # fmt: skip
    """Whether `experts` takes these rows and weights; shared: None where it is given."""
    depth, inner = gate_up.values.shape[2], down.values.shape[2]
    chunks = long_sum_chunks(depth, 128)
    short = depth // 128 // chunks <= stream.BLOCKS.value and depth // 128 % chunks == 0
    assert chunks <= stream.MOST_CHUNKS.value, chunks
    whole = depth % 128 == 0 and inner % 256 == 0
    if shared is not None:
        shared_inner = shared[1].values.shape[1]
        # `linear` must cut its sums where those of the experts are cut.
        same = plan(2 * shared_inner, depth, True).chunks == chunks
        whole = whole and shared_inner % 256 == 0 and same
    fits = down.values.shape[1] // 128 <= _COLUMNS
    long = rows > _FEW and inner >= _LONG
    return long and whole and short and fits and _holds(gate_up.values.device)


@cache
def _holds(device: torch.device) -> bool:
    """Whether all programs are on the card at once."""
    if device.type != "cuda":
        return device.type != "cpu"
    return bool(torch.cuda.get_device_properties(device).multi_processor_count >= PROGRAMS)


@cache
def counters(device: torch.device) -> tuple[torch.Tensor, ...]:
    """(tiles done, behind a place for the programs; chunks done of an item, tiles of a column), all
    0, and room for the chunks' sums; used by one stream at a time."""
    sizes = [16, _TILES, _ITEMS, _COLUMNS]
    ints = torch.zeros(sum(sizes), dtype=torch.int32, device=device).split(sizes)
    floats = PROGRAMS * 4 * 2 * 128 * _AS_THEY_ARE
    return *ints[1:], torch.empty(floats, dtype=torch.float32, device=device)


def experts(
    x: QuantRows, weights: torch.Tensor, pairs: SortedPairs, gate_up: QuantWeight,
    down: QuantWeight, shared: tuple[QuantWeight, QuantWeight] | torch.Tensor,
    halves: tuple[bool, bool] = (True, True),
) -> torch.Tensor:  # fmt: skip
    """`fused_launch.experts`; pairs in tiles of `height(rows)` rows.

    halves: whether gate_up and down run, of which a measurement leaves one out.
    """
    (rows, depth), top_k = x.values.shape, weights.shape[1]
    columns, device = height(rows), x.values.device
    assert pairs.block_m == columns, (pairs.block_m, columns)
    spare, inner, width = pairs.order.numel(), gate_up.values.shape[1] // 2, down.values.shape[1]
    if isinstance(shared, torch.Tensor):
        (shared_up, shared_down), shared_inner, given = (gate_up, down), 0, shared
    else:
        (shared_up, shared_down), given = shared, None
        shared_inner = shared_down.values.shape[1]
    assert pairs.max_tiles - (-rows // columns) <= _TILES, (pairs.max_tiles, rows)
    combine = rows <= _AS_THEY_ARE and given is None
    chunks = long_sum_chunks(depth, 128)
    per = depth // 128 // chunks
    places = spare + (rows if given is None else 0)
    stride = -(-(places + columns) // 16) * 16  # a tile's box may pass the last place
    hidden = torch.empty(stride, inner, dtype=torch.float8_e4m3fn, device=device)
    hidden_scales = torch.empty(inner // 128, stride, dtype=torch.float32, device=device)
    parts = torch.empty(places, width, dtype=torch.bfloat16, device=device)
    out = torch.empty(rows, width, dtype=torch.bfloat16, device=device)
    gathered = rows > _AS_THEY_ARE
    taken = x
    if gathered and halves[0]:
        taken = take(x, pairs, top_k)
    up, back = int(halves[0]), int(halves[1])
    item = inner // 256  # stages of an item of down, of which a unit of gate_up lasts some
    stream.ffn[(PROGRAMS,)](
        boxes(x.values, columns), x.scales, boxes(taken.values, columns), taken.scales,
        boxes(gate_up.values.view(-1, depth), 128), gate_up.scales,
        boxes(down.values.view(-1, inner), 128), down.scales,
        boxes(shared_up.values.view(-1, depth), 128), shared_up.scales,
        boxes(shared_down.values.view(-1, shared_down.values.shape[-1]), 128), shared_down.scales,
        boxes(hidden, columns), hidden, hidden_scales, pairs.order, pairs.tile_expert,
        pairs.tile_begin, pairs.tile_end, pairs.tile_count, *counters(device), parts, pairs.place,
        weights, out, taken.scales.shape[1], stride, pairs.max_tiles, rows, spare, inner,
        shared_inner, width, depth, chunks, per, up, back, int(gathered), int(combine),
        max(1, per * chunks // item), max(1, per // item), top_k, columns, _STAGES[columns],
        num_warps=8, **pdl(),
    )  # fmt: skip
    if combine or not back:
        return out
    return combine_parts(
        parts[None, :spare], pairs, weights, parts[spare:] if given is None else given
    )
