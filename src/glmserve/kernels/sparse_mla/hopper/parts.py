# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""What a tile of `attend` is made of: layouts, gathers, operands of the products, stores.

A tile is 64 tokens of one row's selection, each 656 bytes: 512 e4m3 values in four groups, four
fp32 scales, 64 bf16 values of the roped key.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

NEVER = gl.constexpr(-1.0e30)  # stands for -inf without making NaN in differences
LIFT = gl.constexpr(256.0)  # softmax weights times scales reach up to this in e4m3

MMA8 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 32]))
MMA16 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]))
FRAGMENT = gl.constexpr(gl.DotOperandLayout(0, MMA8.value, 4))
_LANES = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
# The products' layout with the two columns of a head joined: [64 tokens, 8], [128 dims, 8], and
# four warps' sums [4, 8] that each thread has of its own heads.
SCORES = gl.constexpr(
    gl.DistributedLinearLayout([[8, 0], [0, 4]], _LANES, [[16, 0], [32, 0]], [], [64, 8])
)
SUMS = gl.constexpr(
    gl.DistributedLinearLayout([[8, 0], [0, 4], [64, 0]], _LANES, [[16, 0], [32, 0]], [], [128, 8])
)
WARPS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[1, 0], [2, 0], [0, 4]],
        [[0, 1], [0, 2], [0, 0], [0, 0], [0, 0]],
        [[0, 0], [0, 0]],
        [],
        [4, 8],
    )
)
# e4m3 [64 tokens, 128] as threads read it: four dimensions of one token are a word, the four words
# of tokens that differ in bits 3 and 0 a pack. No bank conflicts with 128-byte swizzling.
PACKS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [1, 0], [16, 0], [32, 0]],
        [[2, 0], [4, 0], [0, 4], [0, 8], [0, 16]],
        [[0, 32], [0, 64]],
        [],
        [64, 128],
    )
)
BYTES = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))
HALVES = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
QUERY = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
SCALES = gl.constexpr(gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0]))
TOKENS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]],
        [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 4],
    )
)
ONE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
FOUR = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))


@gluon.jit
def gather_rows(values, ropes, b0, b1, b2, b3, r_buffer, slot):
    """Starts the copies of one tile's rows; slots are at least 0."""
    place = slot.to(gl.int64)
    c = gl.arange(0, 128, layout=gl.SliceLayout(0, BYTES))
    row = values + (place * 656)[:, None] + c[None, :]
    async_copy.async_copy_global_to_shared(b0, row)
    async_copy.async_copy_global_to_shared(b1, row + 128)
    async_copy.async_copy_global_to_shared(b2, row + 256)
    async_copy.async_copy_global_to_shared(b3, row + 384)
    r = gl.arange(0, 64, layout=gl.SliceLayout(0, HALVES))
    place = gl.convert_layout(slot, gl.SliceLayout(1, HALVES)).to(gl.int64)
    key = ropes + (place * 328 + 264)[:, None] + r[None, :]
    async_copy.async_copy_global_to_shared(r_buffer, key)


@gluon.jit
def gather_scales(scales, s_buffer, slot):
    g = gl.arange(0, 4, layout=gl.SliceLayout(0, SCALES))
    scale = scales + (slot.to(gl.int64) * 164 + 128)[:, None] + g[None, :]
    async_copy.async_copy_global_to_shared(s_buffer, scale)


@gluon.jit
def tile_scales(s_buffer):
    """The four groups' scales of a tile, by token of the products' layout."""
    even, odd = gl.split(s_buffer.load(TOKENS).reshape([64, 2, 2]))
    g0, g2 = gl.split(even)
    g1, g3 = gl.split(odd)
    return _line(g0), _line(g1), _line(g2), _line(g3)


@gluon.jit
def _line(x):
    return gl.convert_layout(x, gl.SliceLayout(1, MMA8))


@gluon.jit
def slots_of(mine, place, stop):
    """Slots of a tile; what is unused or beyond the selection reads slot 0 and does not count."""
    return gl.maximum(gl.load(mine + place, mask=place < stop, other=-1), 0)


@gluon.jit
def query_part(q, low, to_range):
    """The high e4m3 part of q, or what is left of it times 16 where `low`."""
    scaled = q * to_range
    high = scaled.to(gl.float8e4nv).to(gl.float32)
    return gl.where(low, (scaled - high) * 16.0, scaled).to(gl.float8e4nv)


@gluon.jit
def power(exponent):
    """2 ** exponent for whole numbers up to 0, exact; 0 below -126."""
    return ((gl.maximum(exponent, -127.0).to(gl.int32) + 127) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def values_operand(buffer):
    """One group's e4m3 [64 tokens, 128] as A operand [128, 64]: line m is dimension
    32 m[5:4] + 4 m[2:0] + 2 m[6] + m[3], column n is the token of `store_weights`."""
    v = gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d;
        prmt.b32 a, $4, $5, 0x5140;
        prmt.b32 b, $4, $5, 0x7362;
        prmt.b32 c, $6, $7, 0x5140;
        prmt.b32 d, $6, $7, 0x7362;
        prmt.b32 $0, a, c, 0x5410;
        prmt.b32 $1, a, c, 0x7632;
        prmt.b32 $2, b, d, 0x5410;
        prmt.b32 $3, b, d, 0x7632;
        }""",
        "=r,=r,=r,=r,r,r,r,r",
        [buffer.load(PACKS)],
        dtype=gl.float8e4nv,
        is_pure=True,
        pack=16,
    )
    # Words and bytes of a pack have changed places: bits t3, t0, d0, d1 of the index now say
    # d0, d1, t3, t0.
    v = v.reshape([4, 2, 4, 2, 4, 8, 2, 2]).permute([3, 4, 1, 5, 0, 2, 6, 7]).reshape([128, 64])
    return gl.convert_layout(v, FRAGMENT)


@gluon.jit
def store_weights(p, scale, buffer):
    """Stores p [64 tokens, 8] times the tokens' scales as high and low e4m3 columns [16, 64],
    tokens in the order of the A operand: bits t5 t4 t2 t1 t0 t3."""
    w = p * scale[:, None]
    high = w.to(gl.float8e4nv)
    low = ((w - high.to(gl.float32)) * 16.0).to(gl.float8e4nv)
    both = gl.join(high, low).reshape([4, 2, 8, 16]).permute([3, 0, 2, 1]).reshape([16, 64])
    buffer.store(both)


@gluon.jit
def product(values, weights, none):
    return warpgroup_mma(values, weights.permute((1, 0)), none, use_acc=False, is_async=True)


@gluon.jit
def joined(c):
    """[128, 16] products with high and low weights -> [128, 8]."""
    high, low = gl.split(c.reshape([128, 8, 2]))
    return gl.convert_layout(high + low * 0.0625, SUMS)


@gluon.jit
def store_partial(acc, target):
    """acc [128, 8] in the order of `joining`: bits head 2, dims 6 to 2, heads 1 0, dims 1 0."""
    x = acc.reshape([2, 4, 2, 8, 2, 4]).permute([4, 1, 3, 5, 0, 2]).reshape([1024])
    i = gl.arange(0, 1024, layout=FOUR)
    gl.store(target + i, gl.convert_layout(x, FOUR).to(target.dtype.element_ty))


@gluon.jit
def store_output(acc, target):
    """acc [128, 8] as [head, 512] in natural order."""
    ROWS: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    x = acc.reshape([2, 4, 2, 8, 8]).permute([4, 1, 3, 0, 2]).reshape([8, 128])
    h = gl.arange(0, 8, layout=gl.SliceLayout(1, ROWS))
    o = gl.arange(0, 128, layout=gl.SliceLayout(0, ROWS))
    gl.store(target + h[:, None] * 512 + o[None, :], gl.convert_layout(x, ROWS).to(gl.bfloat16))


@gluon.jit
def column(x):
    return gl.convert_layout(x, gl.SliceLayout(0, SUMS))[None, :]
