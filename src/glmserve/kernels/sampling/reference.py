# SPDX-License-Identifier: Apache-2.0
"""Sampling over one vocabulary shard, as plain torch.

Drawing from softmax(z) is done by Gumbel-max: argmax(z_v + g_v) with g_v = -log(-log u_v) (Gumbel
1954; Maddison et al. 2014). u_v comes from a counter-based generator keyed by (seed, position,
token id), so a draw depends on nothing else: not on the batch, the shard or the step.

The kernels must draw the same ids from the same logits. So whatever decides is made of operations
that IEEE 754 rounds alike everywhere (no library's log or exp) or of integers: distances from the
row's largest logit on a grid of 2^-17, and masses in fixed point that are functions of them. Sums
of these do not depend on order or width.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK32 = 0xFFFFFFFF
_PHILOX_M0, _PHILOX_M1 = 0xD2511F53, 0xCD9E8D57
_PHILOX_W0, _PHILOX_W1 = 0x9E3779B9, 0xBB67AE85

# A token 32 below the largest scaled logit is never drawn: noise lies in (-2.82, 16.64).
GRID = float(1 << 17)  # steps of the grid per unit of a scaled logit
STEPS = 1 << 22  # the grid ends 32 below the largest
DIGITS = ((16, 6), (10, 6), (5, 5), (0, 5))  # a distance's bits, as (shift, bits)
MASS_BITS = 28
LARGEST_INVERSE = 1e30  # of a temperature: 0 stays 0

# log(1 + f) = f + f^2 p(f) for |f| <= 1/3, and 2^-f = q(f) for 0 <= f < 1; Chebyshev fits with
# relative errors of 6e-8 and 1e-7. Lowest power first.
LOG_POLYNOMIAL = (
    -0.49999985, 0.33333272, -0.25004205, 0.20007323, -0.1648158, 0.14054218, -0.15049426,
    0.13756539,
)  # fmt: skip
EXP_POLYNOMIAL = (
    0.99999994, -0.6931432, 0.2401795, -0.055299606, 0.009210875, -0.00094755366,
)  # fmt: skip
LN2, LOG2_E = 0.6931472, 1.442695


def philox_4x32(key0: Tensor, key1: Tensor, c0: Tensor, c1: Tensor) -> tuple[Tensor, ...]:
    """The four words of Philox4x32-10 (Salmon et al., SC 2011) at counter (c0, c1, 0, 0).

    All arguments are int64 tensors holding unsigned 32-bit values, of shapes that broadcast.
    """
    key0, key1, c0, c1 = torch.broadcast_tensors(key0, key1, c0, c1)
    c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0)
    for _ in range(10):
        # A 64-bit product modulo 2^64 has the right bits, whatever its sign is taken for.
        p0, p1 = c0 * _PHILOX_M0, c2 * _PHILOX_M1
        c0 = ((p1 >> 32) & _MASK32) ^ c1 ^ key0
        c2 = ((p0 >> 32) & _MASK32) ^ c3 ^ key1
        c1, c3 = p1 & _MASK32, p0 & _MASK32
        key0, key1 = (key0 + _PHILOX_W0) & _MASK32, (key1 + _PHILOX_W1) & _MASK32
    return c0, c1, c2, c3


def _polynomial(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    result = torch.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        result = result.mul_(x).add_(coefficient)  # two roundings: no fused multiply-add
    return result


def log(x: Tensor) -> Tensor:
    """Natural logarithm of normal positive fp32, the same bits on every machine."""
    bits = x.view(torch.int32)
    exponent = (bits - 0x3F2AAAAB) >> 23  # mantissa in [2/3, 4/3)
    f = (bits - (exponent << 23)).view(torch.float32) - 1.0
    return exponent.to(torch.float32) * LN2 + (_polynomial(f, LOG_POLYNOMIAL) * (f * f) + f)


def noise_of(words: Tensor) -> Tensor:
    """Standard Gumbel noise, fp32, of 32 random bits each (int64).

    The uniform has 23 of them and is odd over 2^24: exact in fp32 and never 0 or 1.
    """
    uniform = ((words >> 9) * 2 + 1).to(torch.float32) * 2.0**-24
    return -log(-log(uniform))


def gumbel_noise(seeds: Tensor, positions: Tensor, first: int, width: int) -> Tensor:
    """Noise [R, width] fp32 of the token ids [first, first + width).

    seeds [R] int64 (the bits of an unsigned 64-bit seed), positions [R] int64 (of the token that
    is drawn). Four neighbouring ids share a counter: one word each.
    """
    groups = torch.arange(first >> 2, (first + width + 3) >> 2, device=seeds.device)
    words = philox_4x32(
        (seeds & _MASK32)[:, None],
        ((seeds >> 32) & _MASK32)[:, None],
        groups[None, :],
        (positions & _MASK32)[:, None],
    )
    offset = first & 3
    return noise_of(torch.stack(words, dim=2).flatten(1)[:, offset : offset + width])


def scaled_logits(logits: Tensor, temperature: Tensor) -> Tensor:
    """Logits [R, V] over temperature [R], fp32; rows with temperature 0 stay as they are."""
    inverse = torch.ones_like(temperature) / torch.where(temperature > 0, temperature, 1.0)
    return logits.to(torch.float32) * inverse.clamp(max=LARGEST_INVERSE)[:, None]


def distances(scaled: Tensor, row_max: Tensor) -> Tensor:
    """int64 grid steps [R, V] that a scaled logit lies below its row's largest; STEPS = beyond."""
    steps = (row_max[:, None] - scaled) * GRID
    return torch.where(steps < STEPS, steps, float(STEPS)).to(torch.int64)


def masses(distance: Tensor) -> Tensor:
    """2^MASS_BITS exp(-distance / GRID), rounded to an integer; int64."""
    t = distance.to(torch.float32) * (1.0 / GRID) * LOG2_E
    whole = torch.floor(t)
    fraction = _polynomial(t - whole, EXP_POLYNOMIAL) * float(2 << MASS_BITS)
    return ((fraction.to(torch.int64) >> whole.to(torch.int64)) + 1) >> 1


def min_p_steps(min_p: Tensor) -> Tensor:
    """The largest distance, in grid steps, of a token with min_p [R] of the first's probability."""
    bound = (0.0 - log(min_p.to(torch.float32).clamp(min=1e-30))) * GRID
    return torch.where(bound < STEPS - 1, bound, float(STEPS - 1)).to(torch.int64)


def histogram(distance: Tensor, weights: Tensor, prefix: Tensor, shift: int, bits: int) -> Tensor:
    """Sums `weights` [R, V] by `bits` bits of a distance at `shift`: [R, 2^bits] int64.

    Only of distances whose higher bits are `prefix` [R].
    """
    inside = (distance >> (shift + bits)) == prefix[:, None]
    digit = (distance >> shift) & ((1 << bits) - 1)
    sums = torch.zeros(len(distance), 1 << bits, dtype=torch.int64, device=distance.device)
    return sums.scatter_add_(1, digit, torch.where(inside, weights, 0))


def reach(sums: Tensor, before: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """First bin [R] up to which before + sums [R, B] reach the target, and the sum before it.

    The last bin where they never do.
    """
    up_to = sums.cumsum(1) + before[:, None]
    digit = (up_to < target[:, None]).sum(1, keepdim=True).clamp(max=sums.shape[1] - 1)
    return digit[:, 0], (up_to - sums).gather(1, digit)[:, 0]


def first_argmax(values: Tensor) -> tuple[Tensor, Tensor]:
    """Row maxima of [R, V] and the lowest index that has them."""
    best = values.max(dim=1).values
    width = values.shape[1]
    index = torch.arange(width, device=values.device)
    lowest = torch.where(values == best[:, None], index, width).min(dim=1).values
    return best, lowest
