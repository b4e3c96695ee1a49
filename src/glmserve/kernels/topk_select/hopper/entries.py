# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""Votes and lists of a warp's scores, in PTX: four neighbours a thread, so that a warp without
anything to list leaves at once. An entry is two words: the complement of the position, and the
score's bits as an integer in the same order (-0 counts as 0); the larger entry is the better.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def put_extremes(lowest, highest, value, there):
    gl.inline_asm_elementwise(
        """{ .reg .pred p; setp.ne.s32 p, $4, 0; @p red.shared.min.s32 [$1], $3;
        @p red.shared.max.s32 [$2], $3; mov.u32 $0, 0; }""",
        "=r,r,r,r,r", [lowest, highest, value, there.to(gl.int32)], dtype=gl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@gluon.jit
def append(counter, list_, x, position, there):
    """(key, position) entries of scores, a thread one, to a list whose length is at `counter`."""
    gl.inline_asm_elementwise(
        """{ .reg .pred p; .reg .b32 at, key, low; .reg .f32 f; setp.ne.s32 p, $5, 0;
        @p atom.shared.add.u32 at, [$1], 1;
        add.f32 f, $3, 0f00000000; mov.b32 key, f; shr.s32 low, key, 31;
        and.b32 low, low, 2147483647; xor.b32 key, key, low;
        sub.s32 low, 2147483647, $4;
        shl.b32 at, at, 3; add.u32 at, at, $2;
        @p st.shared.v2.b32 [at], {low, key};
        mov.u32 $0, 0; }""",
        "=r,r,r,f,r,r", [counter, list_, x, position, there.to(gl.int32)], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


def _keep4():
    """Scores from the first bin on are counted in it, and their places kept while there is room.
    A warp without any leaves at once."""
    text = """{ .reg .pred p, p0, p1, p2, p3; .reg .b32 at, to; .reg .f32 f;
    setp.ge.f32 p0, $4, 0f4B000000; setp.ge.f32 p1, $5, 0f4B000000;
    setp.ge.f32 p2, $6, 0f4B000000; setp.ge.f32 p3, $7, 0f4B000000;
    or.pred p, p0, p1; or.pred p, p, p2; or.pred p, p, p3;
    mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0;
    vote.sync.any.pred p, p, -1;
    @!p bra none;
    """
    for j in range(4):
        text += f"""min.f32 f, ${4 + j}, 0f4B0007FF; mov.b32 to, f;
        shl.b32 to, to, 2; add.u32 to, to, $12; sub.u32 to, to, 0x2C000000;
        @p{j} red.shared.add.u32 [to], 1;
        @p{j} atom.shared.add.u32 at, [$16], 1;
        setp.lt.and.u32 p{j}, at, $24, p{j};
        shl.b32 at, at, 2; add.u32 at, at, $20;
        @p{j} st.shared.b32 [at], ${8 + j};
        """
    return text + "none: }"


_KEEP4 = gl.constexpr(_keep4())


@gluon.jit
def keep4(y, place, words, HIST: gl.constexpr, KEPT: gl.constexpr, KEEP: gl.constexpr,
          CAPACITY: gl.constexpr):  # fmt: skip
    gl.inline_asm_elementwise(
        _KEEP4,
        "=&r,=&r,=&r,=&r,f,f,f,f,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
        [y, place, words + HIST, words + KEPT, words + KEEP, CAPACITY], dtype=gl.int32,
        is_pure=False, pack=4,
    )  # fmt: skip


_MARKED = gl.constexpr(
    """{ .reg .pred p; .reg .b32 m, l, at, bit; .reg .b64 to;
    or.b32 m, $3, $4; or.b32 l, $5, $6; or.b32 m, m, l;
    setp.eq.s32 p, $7, 0; @p mov.u32 m, 0;
    mov.u64 to, $1;
    next: setp.eq.s32 p, m, 0; @p bra done;
    brev.b32 l, m; clz.b32 l, l;
    shl.b32 at, l, 2; add.s32 at, at, $2;
    """
    + "".join(
        f"""shr.u32 bit, ${3 + j}, l; and.b32 bit, bit, 1; setp.ne.s32 p, bit, 0;
    @p st.global.b32 [to], at; mad.wide.u32 to, bit, 4, to; add.s32 at, at, 1;
    """
        for j in range(4)
    )
    + "sub.s32 l, m, 1; and.b32 m, m, l; bra next; done: mov.u32 $0, 0; }"
)


@gluon.jit
def put_marked(to, start, a, b, c, d, there):
    """Writes the positions whose bits are set, of a segment a thread: for few bits."""
    gl.inline_asm_elementwise(
        _MARKED, "=r,l,r,r,r,r,r,r", [to, start, a, b, c, d, there.to(gl.int32)], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def put_votes(address, flags, counter, first_lane):
    """Of four flags a thread: the warp's four ballots, side by side; adds up the flags set."""
    gl.inline_asm_elementwise(
        """{ .reg .pred p0, p1, p2, p3, q; .reg .b32 m0, m1, m2, m3;
        setp.ne.s32 p0, $8, 0; setp.ne.s32 p1, $9, 0; setp.ne.s32 p2, $10, 0;
        setp.ne.s32 p3, $11, 0; setp.ne.s32 q, $16, 0;
        vote.sync.ballot.b32 m0, p0, -1; vote.sync.ballot.b32 m1, p1, -1;
        vote.sync.ballot.b32 m2, p2, -1; vote.sync.ballot.b32 m3, p3, -1;
        @q st.shared.v4.b32 [$4], {m0, m1, m2, m3};
        popc.b32 m0, m0; popc.b32 m1, m1; popc.b32 m2, m2; popc.b32 m3, m3;
        add.s32 m0, m0, m1; add.s32 m2, m2, m3; add.s32 m0, m0, m2;
        @q red.shared.add.u32 [$12], m0;
        mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0; }""",
        "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
        [address, flags.to(gl.int32), counter, first_lane.to(gl.int32)], dtype=gl.int32,
        is_pure=False, pack=4,
    )  # fmt: skip


def _cut4(counted):
    """Flags of scores above the cut as ballots, entries of those that equal it."""
    text = """{ .reg .pred p, p0, p1, p2, p3, q; .reg .b32 m0, m1, m2, m3, at, key, low;
    .reg .b64 from; .reg .f32 f;
    setp.gt.f32 p0, $4, $8; setp.gt.f32 p1, $5, $9; setp.gt.f32 p2, $6, $10;
    setp.gt.f32 p3, $7, $11; setp.ne.s32 q, $16, 0;
    vote.sync.ballot.b32 m0, p0, -1; vote.sync.ballot.b32 m1, p1, -1;
    vote.sync.ballot.b32 m2, p2, -1; vote.sync.ballot.b32 m3, p3, -1;
    @q st.shared.v4.b32 [$12], {m0, m1, m2, m3};
    """
    if counted:
        text += """popc.b32 m0, m0; popc.b32 m1, m1; popc.b32 m2, m2; popc.b32 m3, m3;
        add.s32 m0, m0, m1; add.s32 m2, m2, m3; add.s32 m0, m0, m2;
        @q red.shared.add.u32 [$20 + 4], m0;
        """
    text += """setp.eq.f32 p0, $4, $8; setp.eq.f32 p1, $5, $9; setp.eq.f32 p2, $6, $10;
    setp.eq.f32 p3, $7, $11;
    or.pred p, p0, p1; or.pred q, p2, p3; or.pred p, p, q;
    mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0;
    vote.sync.any.pred p, p, -1;
    @!p bra none;
    mad.wide.s32 from, $32, 4, $28;
    """
    for j in range(4):
        text += f"""@p{j} atom.shared.add.u32 at, [$20], 1;
        @p{j} ld.global.f32 f, [from + {4 * j}];
        add.f32 f, f, 0f00000000; mov.b32 key, f; shr.s32 low, key, 31;
        and.b32 low, low, 2147483647; xor.b32 key, key, low;
        sub.s32 low, 2147483647, ${32 + j};
        shl.b32 at, at, 3; add.u32 at, at, $24;
        @p{j} st.shared.v2.b32 [at], {{low, key}};
        """
    return text + "none: }"


_CUT4 = gl.constexpr(_cut4(False))
_CUT4_COUNTED = gl.constexpr(_cut4(True))


_APPEND4 = gl.constexpr(
    """{ .reg .pred p, p0, p1, p2, p3; .reg .b32 at, key, low; .reg .f32 f;
    setp.ne.s32 p0, $20, 0; setp.ne.s32 p1, $21, 0; setp.ne.s32 p2, $22, 0;
    setp.ne.s32 p3, $23, 0;
    or.pred p, p0, p1; or.pred p, p, p2; or.pred p, p, p3;
    mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0;
    vote.sync.any.pred p, p, -1;
    @!p bra none;
    """
    + "".join(
        f"""@p{j} atom.shared.add.u32 at, [$4], 1;
    add.f32 f, ${12 + j}, 0f00000000; mov.b32 key, f; shr.s32 low, key, 31;
    and.b32 low, low, 2147483647; xor.b32 key, key, low;
    sub.s32 low, 2147483647, ${16 + j};
    shl.b32 at, at, 3; add.u32 at, at, $8;
    @p{j} st.shared.v2.b32 [at], {{low, key}};
    """
        for j in range(4)
    )
    + "none: }"
)


@gluon.jit
def append4(counter, list_, x, position, there):
    """Entries of four scores a thread; warps that have none leave at once."""
    gl.inline_asm_elementwise(
        _APPEND4,
        "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,f,f,f,f,r,r,r,r,r,r,r,r",
        [counter, list_, x, position, there.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.jit
def cut4(y, cut, votes, lane0, counter, list_, line, position, COUNTED: gl.constexpr):
    """Of four neighbours a thread: a warp's four ballots of y > cut, and (key, position) entries of
    y == cut, scores being read again. The word behind the counter adds up what lies above."""
    gl.inline_asm_elementwise(
        _CUT4_COUNTED if COUNTED else _CUT4,
        "=&r,=&r,=&r,=&r,f,f,f,f,f,f,f,f,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,l,l,l,l,r,r,r,r",
        [y, cut, votes, lane0.to(gl.int32), counter, list_, line, position],
        dtype=gl.int32, is_pure=False, pack=4,
    )  # fmt: skip
