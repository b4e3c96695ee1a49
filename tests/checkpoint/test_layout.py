# SPDX-License-Identifier: Apache-2.0
"""The tensor table against the released model's counts and bytes, and the ranks' shares."""

from __future__ import annotations

import math

import pytest

from glmserve.checkpoint.layout import checkpoint_tensors, local_slice
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
def test_slices_of_the_ranks_cover_each_tensor_once(layout: ExpertLayout) -> None:
    for name, spec in checkpoint_tensors(SMALL).items():
        parts = [local_slice(spec, SMALL, rank, 8, layout) for rank in range(8)]
        held = [math.prod(s.stop - s.start for s in p) for p in parts if p is not None]
        if spec.cut.value == "whole" or (spec.expert is not None and layout == "ep"):
            copies = 1 if spec.expert is not None else 8
            assert held == [math.prod(spec.shape)] * copies, name
        else:
            assert sum(held) == math.prod(spec.shape), name
