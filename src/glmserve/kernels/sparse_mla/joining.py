# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""How a row's selection is split, and the join of what `hopper.tiles` leaves of it: tiles to chains
of four, two chains to a pair, four pairs to the row, in one order whichever of them it starts from.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_common import let_next_start, to_bf16, wait_for_previous

TILE = 64  # tokens
MOST_TILES = 32  # of a row: four pairs of chains of four
MANY_ROWS = 512  # above so many a row's selection is not split, so that nothing is joined
_NEVER = tl.constexpr(-1.0e30)  # as in `hopper.parts`
_LIFT = tl.constexpr(256.0)


@triton.jit
def _power(exponent):
    """2 ** exponent for whole numbers up to 0, exact; 0 below -126."""
    return ((tl.maximum(exponent, -127.0).to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _unit(partial, sizes, row, unit, units, place, head):
    """(sums [G, 4 heads, 4], reference [4], weights' total [4]) of one unit; empty ones are 0."""
    there = unit < units
    at = row * units + unit
    m = tl.load(sizes + at * 16 + head, mask=there, other=_NEVER)
    total = tl.load(sizes + at * 16 + 8 + head, mask=there, other=0.0)
    x = tl.load(partial + at.to(tl.int64) * 4096 + place, mask=there, other=0.0).to(tl.float32)
    return tl.where((m > _NEVER)[None, :, None], x, 0.0), m, total


@triton.jit
def _add(x, m, total, y, n, more):
    """The sum of two sums with references m and n; all factors are powers of two."""
    top = tl.maximum(m, n)
    a = _power(m - top)
    b = _power(n - top)
    return x * a[None, :, None] + y * b[None, :, None], top, total * a + more * b


@triton.jit
def _chain(partial, sizes, row, chain, units, place, head, TILES: tl.constexpr):
    if TILES == 1:
        x0, m0, t0 = _unit(partial, sizes, row, chain * 4, units, place, head)
        x1, m1, t1 = _unit(partial, sizes, row, chain * 4 + 1, units, place, head)
        x2, m2, t2 = _unit(partial, sizes, row, chain * 4 + 2, units, place, head)
        x3, m3, t3 = _unit(partial, sizes, row, chain * 4 + 3, units, place, head)
        x0, m0, t0 = _add(x0, m0, t0, x1, m1, t1)
        x0, m0, t0 = _add(x0, m0, t0, x2, m2, t2)
        return _add(x0, m0, t0, x3, m3, t3)
    else:
        return _unit(partial, sizes, row, chain, units, place, head)


@triton.jit
def _pair(partial, sizes, row, pair, units, place, head, TILES: tl.constexpr):
    if TILES == 8:
        return _unit(partial, sizes, row, pair, units, place, head)
    else:
        x, m, t = _chain(partial, sizes, row, pair * 2, units, place, head, TILES)
        y, n, u = _chain(partial, sizes, row, pair * 2 + 1, units, place, head, TILES)
        x, m, t = _add(x, m, t, y, n, u)
        return to_bf16(x).to(tl.float32), m, t


@triton.jit(do_not_specialize=["units"])
def join(partial, sizes, out, units, TILES: tl.constexpr, SPAN: tl.constexpr):
    """SPAN of a row's 4096 sums, from units of TILES tiles each (1, 4 or 8), of which it has
    `units`. The order of partial: bits of dim 8 7, head 2, dim 6 5 4 3 2, head 1 0, dim 1 0."""
    row = tl.program_id(0)
    begin = tl.program_id(1) * SPAN
    half = (begin >> 9) & 1
    g = tl.arange(0, SPAN // 16)[:, None, None]
    c = tl.arange(0, 4)
    d = tl.arange(0, 4)[None, None, :]
    head = half * 4 + c
    place = begin + g * 16 + c[None, :, None] * 4 + d
    wait_for_previous()
    let_next_start()  # not before: as in `tiles.attend`
    x0, m0, t0 = _pair(partial, sizes, row, 0, units, place, head, TILES)
    x1, m1, t1 = _pair(partial, sizes, row, 1, units, place, head, TILES)
    x2, m2, t2 = _pair(partial, sizes, row, 2, units, place, head, TILES)
    x3, m3, t3 = _pair(partial, sizes, row, 3, units, place, head, TILES)
    x0, m0, t0 = _add(x0, m0, t0, x1, m1, t1)
    x2, m2, t2 = _add(x2, m2, t2, x3, m3, t3)
    x0, m0, t0 = _add(x0, m0, t0, x2, m2, t2)
    inverse = tl.where(t0 > 0, 1.0 / (_LIFT * tl.maximum(t0, 1e-30)), 0.0)
    dim = (begin >> 10) * 128 + ((begin >> 7) & 3) * 32 + g * 4 + d
    target = out + row.to(tl.int64) * 4096 + head[None, :, None] * 512 + dim
    tl.store(target, to_bf16(x0 * inverse[None, :, None]))
