# SPDX-License-Identifier: Apache-2.0
"""Operators of the sampler over a vocabulary shard; what crosses shards is runtime/sampler.py's."""

from __future__ import annotations

from glmserve.kernels.sampling.reference import (
    first_argmax,
    fixed_point_mass,
    gumbel_noise,
    key_histogram,
    ordered_keys,
    refine_threshold,
)

__all__ = [
    "first_argmax",
    "fixed_point_mass",
    "gumbel_noise",
    "key_histogram",
    "ordered_keys",
    "refine_threshold",
]
