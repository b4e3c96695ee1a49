# SPDX-License-Identifier: Apache-2.0
"""Host side of the experts: sort, grouped gate_up, SwiGLU, grouped down, combine; block-fp8
experts of some rows (`fused_launch.serves`) go the shorter way of `fused_launch`.

Nothing here depends on how the router chose: buffers and grids are sized by the number of pairs,
so the whole sequence can be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from ..linear.launch import plan
from ..linear.reference import QuantWeight
from ..pdl import pdl
from ..quantise import launch as quantise_launch
from ..quantise.reference import QuantRows
from ..swiglu import launch as swiglu_launch
from . import fused_launch, hopper, int4, kernel, sorting
from .combining import combine
from .pairs import FEW_ROWS, MANY_ROWS, SortedPairs, empty_pairs, long_sum_chunks
from .reference import ExpertWeight, Int4Weight, first_tensor

_SEGMENTS = 32  # of pairs to sort, at least: one compiled form up to 8192 rows of 8 pairs
_SPLIT_PAIRS = 256  # pairs up to which the chunks of a sum get programs of their own


def unserved(x: torch.Tensor, gate_up: ExpertWeight, down: ExpertWeight) -> dict[str, object]:
    """Why no kernel runs these experts."""
    reasons: dict[str, object] = {}
    if type(gate_up) is not type(down):
        reasons["gate_up and down"] = (type(gate_up).__name__, type(down).__name__)
    if x.dtype != torch.bfloat16:
        reasons["dtype"] = x.dtype
    for name, weight in (("gate_up", gate_up), ("down", down)):
        values = first_tensor(weight)
        depth, unit = values.shape[2], 128 if isinstance(weight, QuantWeight) else 64
        if isinstance(weight, Int4Weight):
            depth, unit = 8 * depth, 128
            group = depth // weight.scales.shape[2]
            if group not in (32, 64, 128):
                reasons[f"{name} group"] = group
        elif isinstance(weight, torch.Tensor) and weight.dtype != torch.bfloat16:
            reasons[f"{name} dtype"] = weight.dtype
        if isinstance(weight, Int4Weight) and values.shape[1] % 8:
            reasons[f"{name} outputs"] = values.shape[1]
        if depth % unit:
            reasons[f"{name} input width"] = depth
    return reasons


def _block_rows(rows: int) -> int:
    """Rows of a tile."""
    return FEW_ROWS if rows <= 256 else MANY_ROWS


def sort_pairs(ids: torch.Tensor, first: int, local: int, block_m: int) -> SortedPairs:
    """ids [R, k] int64 -> the pairs of experts [first, first + local), in tiles of block_m rows."""
    pairs, device = ids.numel(), ids.device
    out = empty_pairs(pairs, local, block_m, device)
    order, place, offsets, tile_expert, tile_begin, tile_end, count, _, max_tiles = out
    bins = triton.next_power_of_2(local + 1)
    block = 256 if pairs <= 256 else 2048
    segments = -(-pairs // block)
    counts = order
    if segments > 1:
        counts = torch.empty(segments, bins, dtype=torch.int32, device=device)
        sorting.count_pairs[(segments,)](
            ids, counts, pairs, first, local, bins, block, num_warps=8, **pdl()
        )  # fmt: skip
    sorting.sort_pairs[(local + 1, segments)](
        ids, counts, order, place, offsets, tile_expert, tile_begin, tile_end, count, pairs, first,
        local, block_m, max_tiles, bins, block,
        1 if segments == 1 else max(_SEGMENTS, triton.next_power_of_2(segments)),
        num_warps=4 if block == 256 else 8, **pdl(),
    )  # fmt: skip
    return out


def grouped_linear(
    x: torch.Tensor | QuantRows, weight: torch.Tensor | QuantWeight, pairs: SortedPairs, top_k: int
) -> torch.Tensor:
    """x times each pair's expert's weight: [parts, pairs, width], fp32 when parts > 1 else bf16.

    top_k > 0: x holds the step's rows; 0: x is in pair order.
    """
    values, x_scales = x if isinstance(x, QuantRows) else (x, x)
    w_values, w_scales = weight if isinstance(weight, QuantWeight) else (weight, weight)
    scaled = isinstance(weight, QuantWeight)
    assert values.dtype == w_values.dtype, (values.dtype, w_values.dtype)
    assert values.is_contiguous(), values.stride()
    assert w_values.is_contiguous(), w_values.stride()
    experts, width, depth = w_values.shape
    total = pairs.order.numel()
    block_k = plan(width, depth, scaled).block_k
    chunks = long_sum_chunks(depth, block_k)
    split = chunks > 1 and total <= _SPLIT_PAIRS and pairs.block_m < MANY_ROWS
    parts = chunks if split else 1
    dtype = torch.float32 if split else torch.bfloat16
    out = torch.empty(parts, total, width, dtype=dtype, device=values.device)
    if isinstance(x, QuantRows) and isinstance(weight, QuantWeight) and pairs.block_m > MANY_ROWS:
        hopper.grouped_linear(x, weight, pairs, top_k, chunks, out[0])
        return out
    common = (
        out, pairs.order, pairs.tile_expert, pairs.tile_begin, pairs.tile_end,
    )  # fmt: skip
    if pairs.block_m < MANY_ROWS:
        assert not scaled, "block-fp8 rows in short tiles: `fused_launch`"
        columns = -(-width // 64)
        stages = min(5, 100_000 // ((64 + pairs.block_m) * block_k * values.element_size()))
        kernel.grouped_few[(pairs.max_tiles * columns * parts,)](
            values, w_values, *common, total, width, depth, chunks, top_k, 64, pairs.block_m,
            block_k, split, stages, num_warps=4,
        )  # fmt: skip
    else:
        flat = w_values.view(experts * width, depth)
        w_desc = TensorDescriptor.from_tensor(flat, [128, block_k])
        columns = -(-width // 128)
        kernel.grouped_many[(pairs.max_tiles * columns,)](
            values, x_scales, w_desc, w_scales, *common, pairs.tile_count, values.shape[0], width,
            depth, depth // block_k // chunks, top_k, MANY_ROWS, 128, block_k, chunks > 1, scaled,
            16, 3, num_warps=4,
        )  # fmt: skip
    return out


def many_rows(x: torch.Tensor) -> int:
    """Rows of a tile of block-fp8 products of many rows."""
    return MANY_ROWS if x.device.type == "cpu" else hopper.TILE


def grouped_int4(
    x: torch.Tensor, weight: Int4Weight, pairs: SortedPairs, top_k: int
) -> torch.Tensor:
    """`grouped_linear` for int4 weights and bf16 rows."""
    _, width, words = weight.packed.shape
    total, depth = pairs.order.numel(), 8 * words
    parts = 4 if depth >= 4096 and depth % 512 == 0 else 1
    dtype = torch.float32 if parts > 1 else torch.bfloat16
    out = torch.empty(parts, total, width, dtype=dtype, device=x.device)
    columns = -(-width // 64)
    int4.grouped_int4[(pairs.max_tiles * columns * parts,)](
        x, weight.packed, weight.scales, weight.packed if weight.zeros is None else weight.zeros,
        out, pairs.order, pairs.tile_expert, pairs.tile_begin, pairs.tile_end, total, width, depth,
        top_k, depth // weight.scales.shape[2], 64, pairs.block_m, weight.zeros is not None, parts,
        4, num_warps=4,
    )  # fmt: skip
    return out


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: ExpertWeight,
    down: ExpertWeight,
    first: int,
    shared: torch.Tensor,
    quantised: QuantRows | None = None,
) -> torch.Tensor:
    """`experts` of the package; quantised: x in fp8 where an earlier kernel made it already."""
    local = first_tensor(gate_up).shape[0]
    if isinstance(gate_up, QuantWeight) and isinstance(down, QuantWeight):
        rows = quantise_launch.quantise(x) if quantised is None else quantised
        if fused_launch.serves(len(x), x.dtype, (gate_up, down)):
            tile = fused_launch.block_rows(len(x), (gate_up, down))
            pairs = sort_pairs(ids, first, local, tile)
            return fused_launch.experts(rows, weights, pairs, gate_up, down, shared)
        pairs = sort_pairs(ids, first, local, many_rows(x))
        hidden = grouped_linear(rows, gate_up, pairs, ids.shape[1])
        inside = swiglu_launch.swiglu_parts_quantised(hidden, pairs.offsets[-1:])
        return combine(grouped_linear(inside, down, pairs, 0), pairs, weights, shared)
    pairs = sort_pairs(ids, first, local, _block_rows(len(x)))
    count = pairs.offsets[-1:]
    if isinstance(gate_up, Int4Weight) and isinstance(down, Int4Weight):
        hidden = grouped_int4(x, gate_up, pairs, ids.shape[1])
        inner = swiglu_launch.swiglu_parts(hidden, count)
        return combine(grouped_int4(inner, down, pairs, 0), pairs, weights, shared)
    assert isinstance(gate_up, torch.Tensor) and isinstance(down, torch.Tensor)
    inner = swiglu_launch.swiglu_parts(grouped_linear(x, gate_up, pairs, ids.shape[1]), count)
    return combine(grouped_linear(inner, down, pairs, 0), pairs, weights, shared)
