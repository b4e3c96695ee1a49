# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""What the sampler's kernels decide by, bit for bit as reference.py says.

Kernels that use these functions are launched with enable_fp_fusion=False: a fused multiply-add
rounds once where the reference rounds twice.
"""

import triton
import triton.language as tl

from ..triton_common import divide
from . import reference

GRID = tl.constexpr(reference.GRID)
STEPS = tl.constexpr(reference.STEPS)
_TWICE_ONE = tl.constexpr(float(2 << reference.MASS_BITS))
LARGEST_INVERSE = tl.constexpr(reference.LARGEST_INVERSE)
_LOG = tl.constexpr(reference.LOG_POLYNOMIAL)
_EXP = tl.constexpr(reference.EXP_POLYNOMIAL)
_LOG_COUNT = tl.constexpr(len(reference.LOG_POLYNOMIAL))
_EXP_COUNT = tl.constexpr(len(reference.EXP_POLYNOMIAL))
_LN2 = tl.constexpr(reference.LN2)
_LOG2_E = tl.constexpr(reference.LOG2_E)
# -log(1 - u) >= g(u); the logarithm of 2^24 (1 - u) is at least the line through its powers of
# two, and such a line is what the bits of a float are.
_BOUND = tl.constexpr((24 + 127) * 0.6931472 + 1e-4)
_BOUND_SLOPE = tl.constexpr(0.6931472 * 2.0**-23)


@triton.jit
def polynomial(x, COEFFICIENTS: tl.constexpr, COUNT: tl.constexpr):
    result = x * 0.0 + COEFFICIENTS[COUNT - 1]
    for i in tl.static_range(COUNT - 2, -1, -1):
        result = result * x + COEFFICIENTS[i]
    return result


@triton.jit
def log(x):
    """Natural logarithm of normal positive fp32."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F2AAAAB) >> 23
    f = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    return exponent.to(tl.float32) * _LN2 + (polynomial(f, _LOG, _LOG_COUNT) * (f * f) + f)


@triton.jit
def noise_of(words):
    """Standard Gumbel noise of uint32 words."""
    uniform = ((words >> 9) * 2 + 1).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08
    return 0.0 - log(0.0 - log(uniform))


@triton.jit
def noise_bound(words):
    """No less than noise_of(words), for a tenth of its cost."""
    rest = (0xFFFFFF - (words >> 9) * 2).to(tl.int32).to(tl.float32)  # 2^24 (1 - u)
    return _BOUND - rest.to(tl.int32, bitcast=True).to(tl.float32) * _BOUND_SLOPE


@triton.jit
def philox(seed, position, groups):
    """Four uint32 words for each group of four ids; seed and position are int64 scalars."""
    key0 = seed.to(tl.uint32)
    key1 = (seed >> 32).to(tl.uint32)
    c0 = groups.to(tl.uint32)
    c1 = c0 * 0 + position.to(tl.uint32)
    c2 = c0 * 0
    c3 = c0 * 0
    for _ in tl.static_range(10):
        p0 = c0.to(tl.uint64) * 0xD2511F53
        p1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ key0
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ key1
        c1 = p1.to(tl.uint32)
        c3 = p0.to(tl.uint32)
        key0 = key0 + 0x9E3779B9
        key1 = key1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def inverse_of(temperature):
    """What logits are multiplied by; 1 where they are taken as they are."""
    t = temperature.to(tl.float32)
    safe = tl.where(t > 0, t, 1.0)
    return tl.minimum(divide(safe * 0.0 + 1.0, safe), LARGEST_INVERSE)


@triton.jit
def distances(scaled, row_max):
    steps = (row_max - scaled) * GRID
    return tl.where(steps < STEPS, steps, STEPS * 1.0).to(tl.int32)


@triton.jit
def masses(distance):
    t = distance.to(tl.float32) * (1.0 / GRID) * _LOG2_E
    whole = tl.floor(t)
    fraction = polynomial(t - whole, _EXP, _EXP_COUNT) * _TWICE_ONE
    shift = tl.minimum(whole, 30.0).to(tl.int32)
    return ((fraction.to(tl.int32) >> shift) + 1) >> 1


@triton.jit
def min_p_steps(min_p):
    """STEPS - 1 where min-p is off."""
    p = min_p.to(tl.float32)
    bound = (0.0 - log(tl.maximum(p, 1e-30))) * GRID
    bound = tl.where((p > 0) & (bound < STEPS - 1), bound, STEPS * 1.0 - 1)
    return bound.to(tl.int32)


@triton.jit
def ordered(values):
    """int32 keys in the order of fp32 values; -0 and 0 have one key."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    """The inverse of `ordered`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
