# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""Words of shared memory, votes and scans of a warp: what `select` is made of, in PTX.

Gluon addresses no shared memory by word and has no votes, and a cluster's CTAs cannot read each
other's: all of it is declared and used here. Tensors have one element a thread or four neighbours.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


def _declaration(words):
    return f"{{ .shared .align 16 .b32 topk_words[{words}]; mov.u32 $0, topk_words; }}"


NEAR_WORDS = gl.constexpr(5728)
FAR_WORDS = gl.constexpr(12256)  # a launch has less than 12288 unasked
_NEAR = gl.constexpr(_declaration(NEAR_WORDS.value))
_FAR = gl.constexpr(_declaration(FAR_WORDS.value))


@gluon.jit
def declare(FAR: gl.constexpr):
    """Address of shared memory; once a kernel."""
    return gl.inline_asm_elementwise(
        _FAR if FAR else _NEAR, "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def put(address, value, there):
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.shared.b32 [$1], $2; mov.u32 $0, 0; }",
        "=r,r,r,r", [address, value, there.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def get(address):
    return gl.inline_asm_elementwise(
        "ld.shared.b32 $0, [$1];", "=r,r", [address], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def put2(address, low, high, there):
    gl.inline_asm_elementwise(
        """{ .reg .pred p; setp.ne.s32 p, $4, 0; @p st.shared.v2.b32 [$1], {$2, $3};
        mov.u32 $0, 0; }""",
        "=r,r,r,r,r", [address, low, high, there.to(gl.int32)], dtype=gl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@gluon.jit
def get2(address):
    return gl.inline_asm_elementwise(
        "ld.shared.v2.b32 {$0, $1}, [$2];", "=r,=r,r", [address], dtype=(gl.int32, gl.int32),
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def get_long(address):
    return gl.inline_asm_elementwise(
        "ld.shared.b64 $0, [$1];", "=l,r", [address], dtype=gl.int64, is_pure=False, pack=1
    )


@gluon.jit
def get4(address):
    return gl.inline_asm_elementwise(
        "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,r", [address],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def peer(address, rank):
    """The same address in another CTA of the cluster."""
    return gl.inline_asm_elementwise(
        "mapa.shared::cluster.u32 $0, $1, $2;", "=r,r,r", [address, rank], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def peer_get(address, there):
    """A word of a peer's, 0 where not `there`."""
    return gl.inline_asm_elementwise(
        """{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.u32 $0, 0;
        @p ld.shared::cluster.b32 $0, [$1]; }""",
        "=&r,r,r", [address, there.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def peer_get2(address):
    return gl.inline_asm_elementwise(
        "ld.shared::cluster.v2.b32 {$0, $1}, [$2];", "=r,=r,r", [address],
        dtype=(gl.int32, gl.int32), is_pure=False, pack=1,
    )  # fmt: skip


_PEER4 = gl.constexpr(
    """{ .reg .pred p; setp.ne.s32 p, $5, 0;
    mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0;
    @p ld.shared::cluster.v4.b32 {$0, $1, $2, $3}, [$4]; }"""
)
_PEER2 = gl.constexpr(
    """{ .reg .pred p; setp.ne.s32 p, $3, 0; mov.u32 $0, 0; mov.u32 $1, 0;
    @p ld.shared::cluster.v2.b32 {$0, $1}, [$2]; }"""
)


@gluon.jit
def peer_words(address, there, MANY: gl.constexpr):
    """Two or four words of a peer's, zeros where not `there`."""
    gl.static_assert(MANY == 2 or MANY == 4)
    if MANY == 4:
        return gl.inline_asm_elementwise(
            _PEER4, "=&r,=&r,=&r,=&r,r,r", [address, there.to(gl.int32)],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    else:
        return gl.inline_asm_elementwise(
            _PEER2, "=&r,=&r,r,r", [address, there.to(gl.int32)], dtype=(gl.int32, gl.int32),
            is_pure=False, pack=1,
        )  # fmt: skip


@gluon.jit
def my_rank():
    return gl.inline_asm_elementwise(
        "mov.u32 $0, %cluster_ctarank;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def cluster_size():
    """Known, but loops up to it are not unrolled: their addresses would be kept in registers."""
    return gl.inline_asm_elementwise(
        "mov.u32 $0, %cluster_nctarank;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def arrive_here():
    """What this CTA wrote to shared memory is there for peers that have met, and its looks at
    theirs are over. A release to the whole cluster: one to this CTA alone takes 0.3 to 1.1 us less,
    but where many CTAs are busy a peer then reads what has not arrived, or an ended CTA's memory.
    """
    gl.inline_asm_elementwise(
        "barrier.cluster.arrive.release.aligned; mov.u32 $0, 0;", "=r", [], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def meet():
    gl.inline_asm_elementwise(
        "{ barrier.cluster.wait.acquire.aligned; mov.u32 $0, 0; }", "=r", [], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def count_up(address, there):
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p red.shared.add.u32 [$1], 1; mov.u32 $0, 0; }",
        "=r,r,r", [address, there.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def count_place(address):
    gl.inline_asm_elementwise(
        "red.shared.add.u32 [$1], 1; mov.u32 $0, 0;", "=r,r", [address], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def no_more(value, most):
    """The lesser of unsigned words."""
    return gl.inline_asm_elementwise(
        "min.u32 $0, $1, $2;", "=r,r,r", [value, most], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def add_up(address, value, there):
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p red.shared.add.u32 [$1], $2; mov.u32 $0, 0; }",
        "=r,r,r,r", [address, value, there.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def set_bits(address, bits, there):
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p red.shared.or.b32 [$1], $2; mov.u32 $0, 0; }",
        "=r,r,r,r", [address, bits, there.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def put4(address, value, there):
    """Four words alike."""
    gl.inline_asm_elementwise(
        """{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.shared.v4.b32 [$1], {$2, $2, $2, $2};
        mov.u32 $0, 0; }""",
        "=r,r,r,r", [address, value, there.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def put_out(pointer, value, there):
    """Stores to global memory from every CTA of a cluster (Gluon's store is the first's alone)."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.b32 [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r,r", [pointer, value, there.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def at_most(x, most):
    """The lesser; NaN stays."""
    return gl.inline_asm_elementwise(
        "min.NaN.f32 $0, $1, $2;", "=f,f,f", [x, most], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def scan(value):
    """Sums up to each lane of a warp."""
    return gl.inline_asm_elementwise(
        """{ .reg .b32 t; .reg .pred p; mov.b32 $0, $1;
        shfl.sync.up.b32 t|p, $0, 1, 0, -1; @p add.s32 $0, $0, t;
        shfl.sync.up.b32 t|p, $0, 2, 0, -1; @p add.s32 $0, $0, t;
        shfl.sync.up.b32 t|p, $0, 4, 0, -1; @p add.s32 $0, $0, t;
        shfl.sync.up.b32 t|p, $0, 8, 0, -1; @p add.s32 $0, $0, t;
        shfl.sync.up.b32 t|p, $0, 16, 0, -1; @p add.s32 $0, $0, t; }""",
        "=&r,r", [value], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def lane_of(value, lane):
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 31, -1;", "=r,r,r", [value, lane], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def least(value):
    """Of a warp, in every lane."""
    return gl.inline_asm_elementwise(
        """{ .reg .f32 t; mov.f32 $0, $1;
        shfl.sync.bfly.b32 t, $0, 16, 31, -1; min.f32 $0, $0, t;
        shfl.sync.bfly.b32 t, $0, 8, 31, -1; min.f32 $0, $0, t;
        shfl.sync.bfly.b32 t, $0, 4, 31, -1; min.f32 $0, $0, t;
        shfl.sync.bfly.b32 t, $0, 2, 31, -1; min.f32 $0, $0, t;
        shfl.sync.bfly.b32 t, $0, 1, 31, -1; min.f32 $0, $0, t; }""",
        "=&f,f", [value], dtype=gl.float32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def extremes(memory, low, high, lane, warp, WARPS: gl.constexpr):
    """(least, largest) of a CTA's tensors of four a thread. One barrier."""
    T: gl.constexpr = 32 * WARPS
    low1 = gl.convert_layout(gl.min(gl.reshape(low, [T, 4]), 1), lane.type.layout)
    high1 = gl.convert_layout(gl.max(gl.reshape(high, [T, 4]), 1), lane.type.layout)
    low1 = least(low1)
    high1 = least(-high1)
    put2(
        memory + warp * 8, low1.to(gl.int32, bitcast=True), high1.to(gl.int32, bitcast=True),
        lane == 0,
    )  # fmt: skip
    gl.thread_barrier()
    bottom = gl.to_tensor(float("inf"))
    top = gl.to_tensor(float("inf"))
    for w in gl.static_range(0, WARPS, 2):
        a, b, c, d = get4(memory + w * 8)
        a = gl.minimum(a.to(gl.float32, bitcast=True), c.to(gl.float32, bitcast=True))
        b = gl.minimum(b.to(gl.float32, bitcast=True), d.to(gl.float32, bitcast=True))
        bottom = gl.minimum(bottom, a)
        top = gl.minimum(top, b)
    return bottom, -top


@gluon.jit
def root(x):
    return gl.inline_asm_elementwise(
        "sqrt.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def bits_of(word):
    return gl.inline_asm_elementwise(
        "popc.b32 $0, $1;", "=r,r", [word], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def bits_below(word, lane):
    return bits_of(word & ((lane * 0 + 1 << lane) - 1))
