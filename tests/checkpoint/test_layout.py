# SPDX-License-Identifier: Apache-2.0
"""The tensor table against the released model's counts and bytes, and the ranks' shares."""

from __future__ import annotations

import math

import pytest
import torch

from glmserve.checkpoint.layout import checkpoint_tensors, local_slice, share_bytes
from glmserve.checkpoint.weights import allocate
from glmserve.model_config import ExpertLayout, ModelConfig
from tests.test_model_config import GLM_5_2

GLM = ModelConfig.from_dict(GLM_5_2)
SMALL = ModelConfig.from_dict(
    {**GLM_5_2, "num_hidden_layers": 5, "n_routed_experts": 8, "hidden_size": 64}
)


def count(config: ModelConfig, mtp: bool) -> int:
    return sum(math.prod(s.shape) for s in checkpoint_tensors(config, mtp).values())


def test_glm_5_2_has_the_published_tensors_and_parameters() -> None:
    assert len(checkpoint_tensors(GLM)) == 59_585
    # The published totals leave out the routers' correction biases (buffers, not parameters).
    biases = 256 * 75
    assert count(GLM, mtp=False) - biases == 743_377_000_704
    assert count(GLM, mtp=True) - biases - 256 == 753_329_921_024


@pytest.mark.parametrize("layout", ["ep", "sliced"])
def test_eight_ranks_hold_everything_once_and_the_replicated_part_eight_times(
    layout: ExpertLayout,
) -> None:
    one = share_bytes(GLM, 0, 1, layout, torch.bfloat16, mtp=False)
    shares = [share_bytes(GLM, rank, 8, layout, torch.bfloat16, mtp=False) for rank in (0, 7)]
    assert len(set(shares)) == 1
    # A-projections, indexers, routers and norms: 1.7 GB in fp8 and bf16, wider here.
    replicated = (8 * shares[0] - one) / 7
    assert 3.2e9 < replicated < 3.7e9
    assert shares[0] == pytest.approx((one - replicated) / 8 + replicated, rel=1e-9)


@pytest.mark.parametrize("layout", ["ep", "sliced"])
@pytest.mark.parametrize("size", [1, 2, 8])
def test_allocated_bytes_are_those_of_the_shapes(size: int, layout: ExpertLayout) -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        weights, views = allocate(SMALL, size - 1, size, layout, dtype, "meta")
        assert weights.parameter_bytes == share_bytes(SMALL, size - 1, size, layout, dtype)
        assert weights.parameter_bytes == sum(v.numel() * v.element_size() for v in views.values())
        for name, view in views.items():
            part = local_slice(checkpoint_tensors(SMALL)[name], SMALL, size - 1, size, layout)
            assert part is not None
            assert tuple(view.shape) == tuple(s.stop - s.start for s in part), name


@pytest.mark.parametrize("layout", ["ep", "sliced"])
def test_slices_of_the_ranks_cover_each_tensor_once(layout: ExpertLayout) -> None:
    for name, spec in checkpoint_tensors(SMALL).items():
        parts = [local_slice(spec, SMALL, rank, 8, layout) for rank in range(8)]
        held = [math.prod(s.stop - s.start for s in p) for p in parts if p is not None]
        if spec.cut.value == "whole" or (spec.expert is not None and layout == "ep"):
            copies = 1 if spec.expert is not None else 8
            assert held == [math.prod(spec.shape)] * copies, name
        else:
            assert sum(held) == math.prod(spec.shape), name


def test_an_mtp_layer_that_is_not_loaded_costs_nothing() -> None:
    weights, views = allocate(SMALL, 0, 2, "ep", torch.float32, "meta", mtp=False)
    assert weights.mtp is None
    assert not any(name.startswith("model.layers.5.") for name in views)
    assert weights.parameter_bytes == share_bytes(SMALL, 0, 2, "ep", torch.float32, mtp=False)
