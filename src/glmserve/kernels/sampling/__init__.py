# SPDX-License-Identifier: Apache-2.0
"""Operators of the sampler over a vocabulary shard; what crosses shards is runtime/sampler.py's.

`launch` (imported where a GPU asks for it) has the kernels' side, `reference` plain torch.
"""

from __future__ import annotations

from glmserve.kernels.sampling.rows import SamplingRows

__all__ = ["SamplingRows"]
