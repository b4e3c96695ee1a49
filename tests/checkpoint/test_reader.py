# SPDX-License-Identifier: Apache-2.0
"""Reading a share: right values in the right places, nothing else read, and errors that name."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from glmserve.checkpoint.layout import checkpoint_tensors, local_slice
from glmserve.checkpoint.loader import Loader
from glmserve.checkpoint.reader import load_weights
from glmserve.checkpoint.safetensors_header import read_headers
from glmserve.checkpoint.synthetic import make_checkpoint
from glmserve.checkpoint.weights import MoeWeights
from glmserve.errors import CheckpointError
from glmserve.model_config import ExpertLayout, ModelConfig

LAYER = "model.layers.4."


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(directory, "tiny", seed=2)
    return directory


@pytest.fixture(scope="module")
def tensors(pristine: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in pristine.glob("*.safetensors"):
        found |= load_file(file)
    return found


Change = Callable[[dict[str, Tensor]], None]


@pytest.fixture
def changed(pristine: Path, tensors: dict[str, Tensor], tmp_path: Path) -> Callable[[Change], Path]:
    """A single-file copy of the checkpoint with its tensors changed."""

    def make(change: Change) -> Path:
        shutil.copy(pristine / "config.json", tmp_path)
        copy = dict(tensors)
        change(copy)
        save_file(copy, tmp_path / "model.safetensors")
        return tmp_path

    return make


def load(directory: Path, rank: int = 0, size: int = 1, layout: ExpertLayout = "ep") -> Any:
    config = ModelConfig.from_file(directory / "config.json")
    return load_weights(directory, config, rank, size, layout, torch.float32)


def test_fused_tensors_hold_the_checkpoints_rows(
    pristine: Path, tensors: dict[str, Tensor]
) -> None:
    weights = load(pristine, rank=1, size=2)
    attention = weights.layers[6].attention
    prefix = "model.layers.6.self_attn."

    def stacked(*names: str) -> Tensor:
        return torch.cat([tensors[f"{prefix}{name}.weight"].float() for name in names])

    assert torch.equal(attention.a_proj, stacked("q_a_proj", "kv_a_proj_with_mqa"))
    assert torch.equal(attention.indexer.proj, stacked("indexer.wk", "indexer.weights_proj"))
    o_proj = tensors[f"{prefix}o_proj.weight"].float()
    assert torch.equal(attention.o_proj, o_proj[:, o_proj.shape[1] // 2 :])
    ffn = weights.layers[4].ffn
    assert isinstance(ffn, MoeWeights)
    assert ffn.first == 8
    gate = tensors[f"{LAYER}mlp.experts.9.gate_proj.weight"].float()
    up = tensors[f"{LAYER}mlp.experts.9.up_proj.weight"].float()
    assert torch.equal(ffn.gate_up[1], torch.cat((gate, up)))


def test_sliced_experts_hold_columns_of_every_expert(
    pristine: Path, tensors: dict[str, Tensor]
) -> None:
    ffn = load(pristine, rank=3, size=4, layout="sliced").layers[4].ffn
    assert len(ffn.gate_up) == 16
    assert ffn.first == 0
    up = tensors[f"{LAYER}mlp.experts.5.up_proj.weight"].float()
    assert torch.equal(ffn.gate_up[5, 16:], up[48:])
    down = tensors[f"{LAYER}mlp.experts.5.down_proj.weight"].float()
    assert torch.equal(ffn.down[5], down[:, 48:])


def test_the_router_stays_wide_in_a_bf16_model(pristine: Path, tensors: dict[str, Tensor]) -> None:
    config = ModelConfig.from_file(pristine / "config.json")
    ffn = load_weights(pristine, config, 0, 8, "ep", torch.bfloat16).layers[4].ffn
    assert isinstance(ffn, MoeWeights)
    assert ffn.down.dtype == torch.bfloat16
    assert torch.equal(ffn.bias, tensors[f"{LAYER}mlp.gate.e_score_correction_bias"])
    assert ffn.bias.dtype == ffn.gate.dtype == torch.float32
    assert not torch.equal(ffn.bias, ffn.bias.bfloat16().float())


@pytest.mark.parametrize("layout", ["ep", "sliced"])
def test_a_rank_reads_only_its_ranges(
    pristine: Path, monkeypatch: pytest.MonkeyPatch, layout: ExpertLayout
) -> None:
    """Every byte that is read belongs to a row that the rank holds some of."""
    asked: list[tuple[str, int, int]] = []
    real = Loader._read

    def read(self: Loader, file: Path, start: int, targets: list[Tensor]) -> None:
        asked.append((file.name, start, sum(t.numel() * t.element_size() for t in targets)))
        real(self, file, start, targets)

    monkeypatch.setattr(Loader, "_read", read)
    config = ModelConfig.from_file(pristine / "config.json")
    load_weights(pristine, config, 5, 8, layout, torch.float32)
    stored = read_headers(pristine).tensors
    wanted: dict[str, set[int]] = {file.name: set() for file in pristine.glob("*.safetensors")}
    for name, spec in checkpoint_tensors(config).items():
        part = local_slice(spec, config, 5, 8, layout)
        if part is not None:
            tensor = stored[name]
            pitch = tensor.nbytes // tensor.shape[0]
            rows = range(part[0].start, part[0].stop)
            start = tensor.offset + rows.start * pitch
            wanted[tensor.file.name] |= set(range(start, start + len(rows) * pitch))
    got: dict[str, list[int]] = {name: [] for name in wanted}
    for file, start, count in asked:
        got[file] += range(start, start + count)
    for file, places in got.items():
        assert len(places) == len(set(places)), "nothing is read twice"
        assert set(places) == wanted[file]
    total = sum(file.stat().st_size for file in pristine.glob("*.safetensors"))
    assert sum(len(places) for places in got.values()) < (0.5 if layout == "ep" else 0.8) * total


def test_progress_ends_with_all_bytes(pristine: Path) -> None:
    lines: list[str] = []
    config = ModelConfig.from_file(pristine / "config.json")
    load_weights(pristine, config, 1, 2, "ep", torch.float32, on_progress=lines.append)
    match = re.fullmatch(
        r"rank 1 \[#{24}\] ([\d.]+) of ([\d.]+) GB of weights, [\d.]+ GB/s, 0 s left", lines[-1]
    )
    assert match is not None, lines[-1]
    assert match[1] == match[2] != "0.00"


def test_missing_extra_and_misshapen_tensors_are_named_together(
    changed: Callable[[Change], Path],
) -> None:
    def damage(tensors: dict[str, Tensor]) -> None:
        del tensors[LAYER + "self_attn.q_b_proj.weight"]
        tensors[LAYER + "self_attn.indexer.wk.weight"] = torch.zeros(2, 2)  # layer 4 is shared
        tensors[LAYER + "mlp.gate.weight"] = torch.zeros(15, 128)

    with pytest.raises(CheckpointError) as caught:
        load(changed(damage))
    message = str(caught.value)
    assert f"missing: {LAYER}self_attn.q_b_proj.weight" in message
    assert f"extra: {LAYER}self_attn.indexer.wk.weight" in message
    assert f"wrong shape: {LAYER}mlp.gate.weight is [15, 128], not [16, 128]" in message


def test_a_rank_checks_tensors_that_others_hold(changed: Callable[[Change], Path]) -> None:
    name = LAYER + "mlp.experts.15.down_proj.weight"

    def drop(tensors: dict[str, Tensor]) -> None:
        del tensors[name]

    with pytest.raises(CheckpointError, match=name):
        load(changed(drop), rank=0, size=8)


def test_copies_beside_the_mtp_layer_are_ignored(changed: Callable[[Change], Path]) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.8.shared_head.head.weight"] = torch.zeros(1024, 128)
        tensors["model.layers.8.embed_tokens.weight"] = torch.zeros(1024, 128)

    assert load(changed(add)).mtp is not None


def test_a_bf16_correction_bias_is_refused(changed: Callable[[Change], Path]) -> None:
    name = LAYER + "mlp.gate.e_score_correction_bias"

    def narrow(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name].bfloat16()

    with pytest.raises(CheckpointError, match=f"wrong dtype: {name} is BF16"):
        load(changed(narrow))


def test_a_checkpoint_without_mtp_layer(changed: Callable[[Change], Path]) -> None:
    def drop(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if n.startswith("model.layers.8.")]:
            del tensors[name]

    directory = changed(drop)
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.8\."):
        load(directory)
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**raw, "num_nextn_predict_layers": 0}))
    assert load(directory).mtp is None


def test_damaged_files_are_checkpoint_errors(pristine: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither"):
        load_weights(
            tmp_path,
            ModelConfig.from_file(pristine / "config.json"),
            0,
            1,
            "ep",
            torch.float32,
        )
    for file in pristine.iterdir():
        shutil.copy(file, tmp_path)
    shard = tmp_path / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors cannot be read"):
        load(tmp_path)
    shard.unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors cannot be read"):
        load(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{}")
    with pytest.raises(CheckpointError, match=r"index\.json cannot be read"):
        load(tmp_path)
