# SPDX-License-Identifier: Apache-2.0
"""Collectives with a model-sized meaning, composed from a group's operations."""

from __future__ import annotations

from torch import Tensor

from glmserve.kernels.residual_norm import Normed, residual_rms_norm
from glmserve.parallel.group import Group


def all_reduce_residual_rms_norm(
    group: Group,
    partial: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    quantised: bool = False,
) -> tuple[Normed, Tensor]:
    """The layer boundary: (rms_norm(s) * weight, s) with s = residual + sum of `partial`.

    partial: [R, D], this rank's share of a row-parallel product; residual: [R, D] (None: zeros) and
    weight: [D], the same on every rank. Both results are [R, D] in the weight's dtype and
    bit-identical on all ranks; quantised asks for the first in fp8 as well.

    Over peers' memory it is one kernel, for as many rows as that memory was made for.
    """
    peers = group.peers
    if peers is not None and peers.serves(partial):
        return peers(partial, residual, weight, eps, quantised)
    return residual_rms_norm(group.all_reduce(partial), residual, weight, eps, quantised)
