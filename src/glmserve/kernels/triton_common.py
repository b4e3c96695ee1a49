# SPDX-License-Identifier: Apache-2.0
"""Helpers that every Triton kernel of the project uses, right on the GPU and in the interpreter.

Triton's interpreter (TRITON_INTERPRET=1, what CI runs without a GPU) multiplies the raw bits of
bf16, truncates where the hardware rounds to even and does not saturate fp8; each helper here hides
one of these. Import the module after the variable is set: it is read once.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

INTERPRET = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
E4M3_MAX = tl.constexpr(448.0)


@triton.jit
def dot(a, b, acc):
    """acc + a b with fp32 accumulation; upcast only where bf16 cannot be multiplied."""
    if INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    else:
        return tl.dot(a, b, acc)


@triton.jit
def to_bf16(x):
    """fp32 -> bf16, ties to even."""
    if INTERPRET:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        return bits.to(tl.float32, bitcast=True).to(tl.bfloat16)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def to_e4m3(x):
    """fp32 -> float8e4nv, ties to even, saturating at 448."""
    if INTERPRET:
        # Snap to the e4m3 grid in fp32; the cast that follows is then exact. 8388608 = 2^23 pushes
        # the fraction out of the mantissa, after scaling the value's last kept bit to 1.
        size = tl.minimum(tl.abs(x), E4M3_MAX)
        exponent = tl.maximum(((size.to(tl.int32, bitcast=True) >> 23) & 255) - 127, -6)
        up = ((130 - exponent) << 23).to(tl.float32, bitcast=True)  # 2^(3 - exponent)
        down = ((124 + exponent) << 23).to(tl.float32, bitcast=True)
        snapped = ((size * up + 8388608.0) - 8388608.0) * down
        return tl.where(x < 0, -snapped, snapped).to(tl.float8e4nv)
    else:
        return x.to(tl.float8e4nv)


@triton.jit
def power_of_two_above(x):
    """The least power of two >= x, for positive normal x."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def divide(a, b):
    """Correctly rounded a / b (plain `/` is an approximation on the GPU)."""
    if INTERPRET:
        return a / b
    else:
        return tl.div_rn(a, b)


@triton.jit
def wait_for_previous(ENABLED: tl.constexpr = True):
    """Until all that earlier kernels wrote is visible; nothing unless launched with `pdl()`."""
    if ENABLED and not INTERPRET:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_start(ENABLED: tl.constexpr = True):
    """Lets the next kernel's programs begin; they still wait for our end (`pdl`)."""
    if ENABLED and not INTERPRET:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(address, inside):
    """Asks for the lines that pointers [...] lie in to be brought to the L2 cache, where `inside`;
    for weights before `wait_for_previous`."""
    if not INTERPRET:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
            "=r,l,r", [address, inside.to(tl.int32)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
