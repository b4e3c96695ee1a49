# SPDX-License-Identifier: Apache-2.0
"""The layer boundary: all-reduce, residual and RMSNorm in one."""

from __future__ import annotations

import torch

from glmserve.parallel.collectives import all_reduce_residual_rms_norm
from tests.model.ranks import on_ranks
from tests.tolerances import assert_close

EPS = 1e-5


def test_the_layer_boundary_normalises_the_residual_plus_everybodys_share() -> None:
    generator = torch.Generator().manual_seed(7)
    partials = torch.randn(4, 5, 48, generator=generator, dtype=torch.float64)
    residual = torch.randn(5, 48, generator=generator, dtype=torch.float64)
    weight = torch.randn(48, generator=generator, dtype=torch.float64)
    results = on_ranks(
        4, lambda g: all_reduce_residual_rms_norm(g, partials[g.rank], residual, weight, EPS)
    )
    total = residual + partials.sum(0)
    normed = total / torch.sqrt(total.square().mean(-1, keepdim=True) + EPS) * weight
    assert_close("residual", total, results[0][1], "operator_fp64")
    assert_close("normed", normed, results[0][0].rows, "operator_fp64")
    for other in results[1:]:
        assert torch.equal(other[0].rows, results[0][0].rows)
        assert torch.equal(other[1], results[0][1])
