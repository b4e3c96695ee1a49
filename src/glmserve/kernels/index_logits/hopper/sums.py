# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""From products of keys and heads to one score a thread; the sums have the plain form's order."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# [64 keys, 2 rows or pages] as `exchanged` leaves them: one score a thread.
SCORES = gl.constexpr(
    gl.DistributedLinearLayout(
        [], [[8, 0], [0, 1], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 2]
    )
)


@gluon.jit
def _from_second(x):
    """x of the thread whose lane number differs in bit 1."""
    return gl.inline_asm_elementwise(
        "shfl.sync.bfly.b32 $0, $1, 2, 0x1f, 0xffffffff;", "=r,r", [x], dtype=gl.float32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _from_first(x):
    """x of the thread whose lane number differs in bit 0."""
    return gl.inline_asm_elementwise(
        "shfl.sync.bfly.b32 $0, $1, 1, 0x1f, 0xffffffff;", "=r,r", [x], dtype=gl.float32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def own_heads(acc, w):
    """acc [64, 32], w [32] -> what a thread's eight heads add to keys g and g + 8 of its warp,
    [4 warps, 8 g, 4 threads] each."""
    s = gl.maximum(acc, 0.0) * w[None, :]
    s = s.reshape([4, 2, 8, 4, 4, 2]).permute([0, 2, 4, 1, 3, 5]).reshape([4, 8, 4, 2, 8])
    return gl.split(gl.sum(s, 4))


@gluon.jit
def own_heads_of_two(acc, w):
    """As `own_heads` for two rows, acc [64, 64], w [64]: g and g + 8 of one row, then the other."""
    s = gl.maximum(acc, 0.0) * w[None, :]
    s = s.reshape([4, 2, 8, 2, 4, 4, 2]).permute([0, 2, 5, 3, 1, 4, 6]).reshape([4, 8, 4, 2, 2, 8])
    s = gl.sum(s, 5)
    first, second = gl.split(s.permute([0, 1, 2, 4, 3]))
    a, b = gl.split(first)
    c, d = gl.split(second)
    return a, b, c, d


@gluon.jit
def exchanged(a, b, c, d):
    """Sums over the four threads of a key: a, b of column 0 and keys g, g + 8; c, d of column 1
    -> [64 keys, 2]. Thread t keeps column t / 2 and key g + 8 (t % 2)."""
    t = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, a.type.layout)))
    upper = ((t & 2) != 0)[None, None, :]
    odd = ((t & 1) != 0)[None, None, :]
    x = gl.where(upper, c, a) + _from_second(gl.where(upper, a, c))
    y = gl.where(upper, d, b) + _from_second(gl.where(upper, b, d))
    z = gl.where(odd, y, x) + _from_first(gl.where(odd, x, y))
    z = z.reshape([4, 8, 2, 2]).permute([0, 3, 1, 2]).reshape([64, 2])
    return gl.convert_layout(z, SCORES, assert_trivial=True)
