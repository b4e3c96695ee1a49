# SPDX-License-Identifier: Apache-2.0
"""Sampling over one vocabulary shard, as plain torch.

Drawing from softmax(z) is done by Gumbel-max: argmax(z_v + g_v) with g_v = -log(-log u_v) (Gumbel
1954; Maddison et al. 2014). u_v comes from a counter-based generator keyed by (seed, position,
token id), so a draw depends on nothing else: not on the batch, the shard or the step.

Top-k and top-p need a threshold over the whole vocabulary. Logits map to integer keys of the same
order, and the threshold is found eight key bits at a time from histograms that add up over shards
(counts for top-k, fixed-point masses for top-p: integers, so the cut is the same at any width).
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK32 = 0xFFFFFFFF
_PHILOX_M0, _PHILOX_M1 = 0xD2511F53, 0xCD9E8D57
_PHILOX_W0, _PHILOX_W1 = 0x9E3779B9, 0xBB67AE85
MASS_BITS = 40  # exp(z - max) in (0, 1] as an integer of this many bits


def _mul_hi_lo(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a 32 x 32 bit product; 16-bit halves keep int64 from overflowing."""
    low, high = b & 0xFFFF, b >> 16
    p0 = a * low  # < 2^48
    p1 = a * high + (p0 >> 16)  # < 2^49
    return p1 >> 16, ((p1 & 0xFFFF) << 16) | (p0 & 0xFFFF)


def philox_4x32(key0: Tensor, key1: Tensor, c0: Tensor, c1: Tensor) -> Tensor:
    """First output word of Philox4x32-10 (Salmon et al., SC 2011) at counter (c0, c1, 0, 0).

    All arguments are int64 tensors holding unsigned 32-bit values, of shapes that broadcast.
    """
    key0, key1, c0, c1 = torch.broadcast_tensors(key0, key1, c0, c1)
    c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0)
    for _ in range(10):
        hi0, lo0 = _mul_hi_lo(_PHILOX_M0, c0)
        hi1, lo1 = _mul_hi_lo(_PHILOX_M1, c2)
        c0, c1, c2, c3 = hi1 ^ c1 ^ key0, lo1, hi0 ^ c3 ^ key1, lo0
        key0, key1 = (key0 + _PHILOX_W0) & _MASK32, (key1 + _PHILOX_W1) & _MASK32
    return c0


def gumbel_noise(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Standard Gumbel noise [R, V] fp32.

    seeds [R] int64 (the bits of an unsigned 64-bit seed), positions [R] int64 (of the token that
    is drawn), ids [V] int64. The uniform has 23 bits and is odd over 2^24: exact in fp32 and never
    0 or 1.
    """
    word = philox_4x32(
        (seeds & _MASK32)[:, None],
        ((seeds >> 32) & _MASK32)[:, None],
        ids[None, :],
        positions[:, None],
    )
    uniform = ((word >> 9) * 2 + 1).to(torch.float32) * 2.0**-24
    return -torch.log(-torch.log(uniform))


def ordered_keys(values: Tensor) -> Tensor:
    """int64 keys in [0, 2^32) with the order of fp32 `values`; equal values have equal keys."""
    bits = (values.to(torch.float32) + 0.0).view(torch.int32).to(torch.int64) & _MASK32
    return torch.where(bits >> 31 == 1, bits ^ _MASK32, bits | 0x80000000)


def fixed_point_mass(logits: Tensor, row_max: Tensor) -> Tensor:
    """exp(logits - row_max) as int64 in [0, 2^40]; [R, V] and [R] give [R, V]."""
    mass = torch.exp(logits.to(torch.float64) - row_max.to(torch.float64)[:, None])
    return (mass * float(1 << MASS_BITS)).to(torch.int64)


def key_histogram(keys: Tensor, weights: Tensor, prefix: Tensor, shift: int) -> Tensor:
    """Sums `weights` [R, V] by the 8 key bits at `shift`, where the higher bits equal `prefix` [R].

    Returns [R, 256] int64. At shift 24 there are no higher bits and `prefix` is 0.
    """
    match = (keys >> (shift + 8)) == prefix[:, None]
    digit = (keys >> shift) & 0xFF
    histogram = torch.zeros(keys.shape[0], 256, dtype=torch.int64, device=keys.device)
    return histogram.scatter_add_(1, digit, torch.where(match, weights, 0))


def refine_threshold(
    histogram: Tensor, prefix: Tensor, above: Tensor, target: Tensor
) -> tuple[Tensor, Tensor]:
    """One step of the descent to the largest key whose weight from the top reaches `target`.

    histogram [R, 256] (summed over shards), prefix [R] bits found so far, above [R] weight of all
    keys beyond this prefix, target [R]. Returns the longer prefix and the weight above it.
    """
    from_top = histogram.flip(1).cumsum(1).flip(1) + above[:, None]  # weight of digits >= d
    reached = from_top >= target[:, None]
    # from_top falls with d, so the digit is the last one that still reaches the target.
    digit = (reached.sum(1) - 1).clamp(min=0)
    new_above = from_top.gather(1, digit[:, None])[:, 0] - histogram.gather(1, digit[:, None])[:, 0]
    return prefix * 256 + digit, new_above


def first_argmax(values: Tensor) -> tuple[Tensor, Tensor]:
    """Row maxima of [R, V] and the lowest index that has them."""
    best = values.max(dim=1).values
    width = values.shape[1]
    index = torch.arange(width, device=values.device)
    lowest = torch.where(values == best[:, None], index, width).min(dim=1).values
    return best, lowest
