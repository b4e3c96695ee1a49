# SPDX-License-Identifier: Apache-2.0
"""RMSNorm behind the residual addition of a layer boundary, in fp8 as well where that is read."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..dispatch import use_kernel
from ..linear.reference import QuantWeight
from ..quantise.reference import GROUP, QuantRows, quantise
from . import reference

__all__ = ["Normed", "residual_rms_norm"]


class Normed(NamedTuple):
    """Normed rows, and the same in fp8 where something reads them so."""

    rows: torch.Tensor  # [R, D]
    quantised: QuantRows | None = None

    def for_weight(self, weight: object) -> torch.Tensor | QuantRows:
        """The form that a product with `weight` takes."""
        quantised = self.quantised if isinstance(weight, QuantWeight) else None
        return self.rows if quantised is None else quantised


def residual_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    quantised: bool = False,
) -> tuple[Normed, torch.Tensor]:
    """(rms_norm(s) * weight, s) with s = x + residual, both [R, D] in weight's dtype.

    x may be wider than the residual (an unrounded sum); the addition is done in acc and rounded
    once, and the norm is that of the rounded sum, which is what the next boundary adds to.
    residual None stands for zeros; quantised (D a multiple of 128) asks for the normed rows in fp8
    beside them.
    """
    assert residual is None or x.shape == residual.shape, (x.shape, residual)
    assert x.shape[-1] == weight.shape[0], (x.shape, weight.shape)
    assert residual is None or residual.dtype == weight.dtype
    assert not quantised or x.shape[1] % GROUP == 0, x.shape
    if x.is_cuda:
        from . import launch

        if use_kernel("residual_rms_norm", "cuda", launch.unserved(weight.dtype, x.dtype)):
            plain = None if residual is None else residual.contiguous()
            normed, total, rows = launch.residual_norm(
                x.contiguous(), plain, weight, eps, quantised
            )
            return Normed(normed, rows), total
    normed, total = reference.residual_rms_norm(x, residual, weight, eps)
    return Normed(normed, quantise(normed) if quantised else None), total
