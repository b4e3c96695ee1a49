# SPDX-License-Identifier: Apache-2.0
"""The reference operators against the committed golden of GLM's head sizes: plain, in block-fp8
weights, in fp8 caches. On a GPU `test_gpu_golden.py` runs the kernels against the same golden."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from glmserve.cache_format import CacheFormat
from glmserve.kernels.linear import QuantWeight
from tests.golden import forward
from tests.model.forward_golden import check_choices, check_states, load_golden, load_model, run

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("dtype", "fp8", "cache", "key"),
    [
        (torch.float32, False, "model", "forward_fp32"),
        (torch.bfloat16, False, "model", "forward_bf16"),
        (torch.bfloat16, True, "fp8", "forward_fp8"),
    ],
    ids=["fp32", "bf16", "fp8 weights and caches"],
)
def test_references_equal_the_golden(
    tmp_path: Path,
    dtype: torch.dtype,
    fp8: bool,
    cache: CacheFormat,
    key: str,
) -> None:
    golden = load_golden("block")
    forward.write_checkpoint(tmp_path / "c", "block", fp8)
    model = load_model(tmp_path / "c", "block", dtype, CPU, cache, keep=fp8)
    assert isinstance(model.decoder.weights.layers[1].attention.o_proj, QuantWeight) == fp8
    result = run(model, "block", golden)
    check_states(golden, result, key)
    check_choices(golden, result, key)


def test_both_forms_of_the_checkpoint_hold_the_same_numbers(tmp_path: Path) -> None:
    for fp8 in (False, True):
        forward.write_checkpoint(tmp_path / str(fp8), "block", fp8)
    plain, quantised = (
        load_model(tmp_path / str(fp8), "block", torch.float32, CPU, "model", keep=False)
        for fp8 in (False, True)
    )
    for a, b in zip(plain.decoder.weights.layers, quantised.decoder.weights.layers, strict=True):
        assert isinstance(a.attention.q_b, torch.Tensor)
        assert isinstance(b.attention.q_b, torch.Tensor)
        assert torch.equal(a.attention.q_b, b.attention.q_b)
        assert torch.equal(a.attention.kv_b, b.attention.kv_b)
        assert isinstance(a.ffn.gate_up, torch.Tensor)
        assert isinstance(b.ffn.gate_up, torch.Tensor)
        assert torch.equal(a.ffn.gate_up, b.ffn.gate_up)


def test_a_wrong_selection_is_noticed(tmp_path: Path) -> None:
    golden = load_golden("block")
    forward.write_checkpoint(tmp_path / "c", "block", fp8=False)
    model = load_model(tmp_path / "c", "block", torch.float32, CPU, "model", keep=False)
    other = dict(golden)
    other["chosen"] = np.roll(golden["chosen"], 1, axis=1)  # the row before's
    with pytest.raises(AssertionError):
        check_states(golden, run(model, "block", other), "forward_bf16")
    result = run(model, "block", golden)
    result.positions[1][0] = result.positions[1][0].roll(1, 0)
    with pytest.raises(AssertionError):
        check_choices(golden, result, "forward_fp8")
