# SPDX-License-Identifier: Apache-2.0
"""The four config.pbtxt files say what the tensor table says, and keep what ordering needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from glmserve.server.tensors import DIRECT, MODELS


def _config(root: Path, model: str) -> Any:
    text = (root / "model_repository" / model / "config.pbtxt").read_text()
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def _dtype(number: int) -> str:
    return str(model_config_pb2.DataType.Name(number)).removeprefix("TYPE_")


@pytest.mark.parametrize("model", MODELS)
def test_config_equals_tensor_table(root: Path, model: str) -> None:
    config = _config(root, model)
    table = MODELS[model]
    assert [(t.name, _dtype(t.data_type), tuple(t.dims), t.optional) for t in config.input] == [
        (t.name, t.dtype, t.dims, t.optional) for t in table.inputs
    ]
    assert [(t.name, _dtype(t.data_type), tuple(t.dims)) for t in config.output] == [
        (t.name, t.dtype, t.dims) for t in table.outputs
    ]


@pytest.mark.parametrize("model", MODELS)
def test_config_has_the_shape_that_ordering_needs(root: Path, model: str) -> None:
    config = _config(root, model)
    assert config.name == model
    assert config.max_batch_size == 0
    assert not config.HasField("dynamic_batching")
    assert config.model_transaction_policy.decoupled == (model == "glm_dsa")
    kinds = [group.kind for group in config.instance_group]
    assert all(kind == model_config_pb2.ModelInstanceGroup.KIND_CPU for kind in kinds)
    if model in ("glm_dsa", "postprocess"):
        assert [group.count for group in config.instance_group] == [1]


def test_ensemble_wires_every_tensor_of_its_steps(root: Path) -> None:
    steps = _config(root, "ensemble").ensemble_scheduling.step
    assert [step.model_name for step in steps] == ["preprocess", "glm_dsa", "postprocess"]
    made = {t.name for t in MODELS["ensemble"].inputs}
    for step in steps:
        table = MODELS[step.model_name]
        assert set(step.input_map) == {t.name for t in table.inputs} - set(DIRECT)
        assert set(step.output_map) == {t.name for t in table.outputs}
        assert set(step.input_map.values()) <= made
        # A tensor keeps its name (and so its type) on its way from one model to the next.
        wires = [*step.input_map.items(), *step.output_map.items()]
        assert all(wire.rpartition(".")[2] == name for name, wire in wires)
        made |= set(step.output_map.values())
    assert {t.name for t in MODELS["ensemble"].outputs} <= made


def test_vllm_backend_names_have_its_ranks_and_dtypes(root: Path) -> None:
    inputs = {t.name: (_dtype(t.data_type), list(t.dims)) for t in _config(root, "ensemble").input}
    assert inputs["text_input"] == ("STRING", [1])
    assert inputs["sampling_parameters"] == ("STRING", [1])
    for flag in ("stream", "exclude_input_in_output", "return_finish_reason"):
        assert inputs[flag] == ("BOOL", [1])
    for flag in ("return_num_input_tokens", "return_num_output_tokens"):
        assert inputs[flag] == ("BOOL", [1])
    outputs = {
        t.name: (_dtype(t.data_type), list(t.dims)) for t in _config(root, "ensemble").output
    }
    assert outputs["text_output"] == ("STRING", [-1])
    assert outputs["finish_reason"] == ("STRING", [-1])
    assert outputs["num_input_tokens"] == ("UINT32", [1])
    assert outputs["num_output_tokens"] == ("UINT32", [-1])
