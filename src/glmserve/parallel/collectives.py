# SPDX-License-Identifier: Apache-2.0
"""Collectives with a model-sized meaning, composed from a group's operations."""

from __future__ import annotations

from torch import Tensor

from glmserve.kernels.residual_norm import residual_rms_norm
from glmserve.parallel.group import Group


def all_reduce_residual_rms_norm(
    group: Group, partial: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The layer boundary: (rms_norm(s) * weight, s) with s = residual + sum of `partial`.

    partial: [R, D], this rank's share of a row-parallel product; residual: [R, D] and weight: [D],
    the same on every rank. Both results are [R, D] in the residual's dtype and bit-identical on
    all ranks.
    """
    return residual_rms_norm(group.all_reduce(partial), residual, weight, eps)
