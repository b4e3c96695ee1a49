# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""Counting in shared memory, and the n-th largest of a few: parts of both kernels of `kernel`.

Entries are 64-bit words, the key above and the complement of the position below, so that the larger
word is the better one and no two are equal. Triton has no addressable shared memory: it is declared
and used in PTX; the interpreter, which cannot run that, takes library functions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_common import INTERPRET

BINS = tl.constexpr(2048)
ROOM = tl.constexpr(512)  # entries of the bin that holds the k-th
# Words of shared memory: counts, then one each for how many entries there are, the bin, what is
# above it and in it, two for the entry that was found, then (from _LIST) the entries. Less than
# 16 KB in all: with what Triton takes it must stay below 48, which a launch has unasked.
_COUNT, _FOUND, _NTH, _LIST = (tl.constexpr(4 * i) for i in (2048, 2049, 2052, 2064))
_DECLARE = tl.constexpr("{ .shared .align 16 .b32 topk_words[3088]; mov.u32 $0, topk_words; }")


@triton.jit
def _words():
    return tl.inline_asm_elementwise(_DECLARE, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _put(address, value, there):
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.shared.b32 [$1], $2; mov.u32 $0, 0; }",
        "=r,r,r,r", [address, value, there.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _get(address):
    return tl.inline_asm_elementwise(
        "ld.shared.b32 $0, [$1];", "=r,r", [address], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _put_entry(address, value, there):
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.shared.b64 [$1], $2; mov.u32 $0, 0; }",
        "=r,r,l,r", [address, value, there.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _get_entry(address):
    return tl.inline_asm_elementwise(
        "ld.shared.b64 $0, [$1];", "=l,r", [address], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def _append(words, value, there):
    tl.inline_asm_elementwise(
        """{
        .reg .pred p;
        .reg .b32 place;
        setp.ne.s32 p, $3, 0;
        @p atom.shared.add.u32 place, [$1 + 8192], 1;
        @p shl.b32 place, place, 3;
        @p add.u32 place, place, $1;
        @p st.shared.b64 [place + 8256], $2;
        mov.u32 $0, 0;
        }""",
        "=r,r,l,r", [words, value, there.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _count_up(address, there):
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p red.shared.add.u32 [$1], 1; mov.u32 $0, 0; }",
        "=r,r,r", [address, there.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def prepare():
    """The address of shared memory, all counts zero and no bin found; 0 in the interpreter."""
    words = 0
    if not INTERPRET:
        words = _words()
        b = tl.arange(0, BINS)
        _put(words + b * 4, b * 0, b >= 0)
        s = tl.arange(0, 16)
        _put(words + _COUNT + s * 4, tl.where(s == 1, -1, 0), s >= 0)
        tl.debug_barrier()
    return words


@triton.jit
def count(words, place, there):
    """Adds up places that are there; the interpreter's counts are what it returns."""
    if INTERPRET:
        return tl.histogram(place, BINS, mask=there)
    else:
        _count_up(words + place * 4, there)
        return tl.arange(0, BINS) * 0


@triton.jit
def counts(words, counted):
    """All counts, the last bin first. `counted`: the sum of what `count` returned."""
    if INTERPRET:
        return tl.flip(counted, 0)
    else:
        tl.debug_barrier()
        return _get(words + (BINS - 1 - tl.arange(0, BINS)) * 4)


@triton.jit
def find(words, from_top, need):
    """(bin, count above it, count in it) where counts from the top reach `need`; (-1, all, 0) if
    they do not."""
    reached = tl.cumsum(from_top, 0)
    i = tl.arange(0, BINS)
    if INTERPRET:
        short = reached < need
        passed = tl.sum(short.to(tl.int32), 0)
        above = tl.max(tl.where(short, reached, 0), 0)
        return BINS - 1 - passed, above, tl.sum(tl.where(i == passed, from_top, 0), 0)
    else:
        hit = (reached >= need) & (reached - from_top < need)
        at = words + _FOUND + i * 0
        _put(at, BINS - 1 - i, hit)
        all_short = (i == BINS - 1) & (reached < need)
        _put(at + 4, tl.where(hit, reached - from_top, reached), hit | all_short)
        _put(at + 8, from_top, hit)
        tl.debug_barrier()
        return _get(words + _FOUND), _get(words + _FOUND + 4), _get(words + _FOUND + 8)


@triton.jit
def entry(key, position):
    return (key.to(tl.int64) << 32) | (0x7FFFFFFF - position).to(tl.int64)


@triton.jit
def key_and_position(entry):
    return (entry >> 32).to(tl.int32), 0x7FFFFFFF - (entry & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def nth(words, entries, there, total, need):
    """The `need`-th best of the `total` entries that are there, at most ROOM; once a launch."""
    if INTERPRET:
        found = tl.full([], -9223372036854775807 - 1, tl.int64)  # bit by bit; sorting takes minutes
        for bit in tl.static_range(64):
            higher = found + (found * 0 + 1 << (63 - bit))
            reached = tl.sum((there & (entries >= higher)).to(tl.int32), 0)
            found = tl.where(reached >= need, higher, found)
        return found
    else:
        _append(words, entries, there)
        tl.debug_barrier()
        i = tl.arange(0, ROOM)
        mine = _get_entry(words + _LIST + i * 8)
        better = i * 0
        for j in range(0, total, 4):
            for u in tl.static_range(4):
                other = _get_entry(words + _LIST + (j + u) * 8)
                better += ((other > mine) & (j + u < total)).to(tl.int32)
        _put_entry(words + _NTH + i * 0, mine, (better == need - 1) & (i < total))
        tl.debug_barrier()
        return _get_entry(words + _NTH)
