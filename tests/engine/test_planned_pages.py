# SPDX-License-Identifier: Apache-2.0
"""Pages on a GPU are planned before a rank starts; no GPU is needed to plan."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from glmserve.checkpoint.declared import CONFIGS
from glmserve.config import EngineConfig
from glmserve.engine import gpu_memory as module
from glmserve.engine.process import resolve
from glmserve.errors import ConfigError


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_bytes((CONFIGS / "glm-5.2-fp8.json").read_bytes())
    return str(tmp_path)


def settings(checkpoint: str, **changes: Any) -> EngineConfig:
    values: dict[str, Any] = {"ranks": 8, "device": "cuda", "dtype": "bf16", "num_pages": 0}
    values |= {"collectives": "nccl", "synthetic": True, "gpu_memory_gb": 149.0}
    return EngineConfig(checkpoint, **values | changes)


def test_all_that_fits_is_used_and_bounds_the_context(checkpoint: str) -> None:
    config, model = resolve(settings(checkpoint))
    assert 10_000 < config.num_pages < 15_000
    assert config.max_model_len == (config.num_pages - 1) * 64 < model.max_position_embeddings
    shorter, _ = resolve(settings(checkpoint, max_model_len=8192))
    assert shorter.num_pages > config.num_pages
    assert shorter.max_model_len == 8192


def test_a_model_that_does_not_fit_is_refused_with_the_numbers(checkpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"memory = '80\.00 GB'.*routed experts 90\.62"):
        resolve(settings(checkpoint, gpu_memory_gb=80.0))
    with pytest.raises(ConfigError, match=r"num_pages = 99999: need \d+\.\d\d GB a rank, \d+ fit"):
        resolve(settings(checkpoint, num_pages=99_999))


def test_what_is_free_comes_from_the_drivers_tool(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, "141000\n140000\n", "")

    monkeypatch.setattr(module.subprocess, "run", run)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    config = settings(checkpoint, ranks=2, gpu_memory_gb=0.0)
    assert module.gpu_memory(config) == 140_000 * 2**20
    assert asked[0][-1] == "--id=3,5"


def test_without_that_tool_the_setting_is_asked_for(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="gpu_memory_gb = 0: set it: nvidia-smi does not tell"):
        resolve(settings(checkpoint, gpu_memory_gb=0.0))
    config, _ = resolve(settings(checkpoint, gpu_memory_gb=0.0, num_pages=33))
    assert config.num_pages == 33
