# SPDX-License-Identifier: Apache-2.0
"""What runs where nothing is asked for: a GPU where there is one, else the CPU."""

from __future__ import annotations

import pytest

from glmserve import config, env
from glmserve.config import engine_config_from_env
from glmserve.server import launcher


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*env.REGISTRY, "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def machine(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    class Node:
        def __init__(self, name: str) -> None:
            self.name = name

    class Dev:
        def __init__(self, _path: str) -> None:
            pass

        def glob(self, _pattern: str) -> list[Node]:
            return [Node(f"nvidia{i}") for i in range(gpus)] + [Node("nvidia0-mig")]

    monkeypatch.setattr(config, "Path", Dev)


@pytest.mark.parametrize(("gpus", "ranks"), [(0, 8), (1, 1), (2, 2), (3, 2), (8, 8), (16, 8)])
def test_a_gpu_is_used_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, gpus: int, ranks: int
) -> None:
    machine(monkeypatch, gpus)
    found = engine_config_from_env(checkpoint="anywhere")
    assert found.device == ("cuda" if gpus else "cpu")
    assert found.dtype == ("bf16" if gpus else "fp64")
    assert found.ranks == ranks
    assert engine_config_from_env(checkpoint="anywhere", device="cpu").ranks == 8


def test_gpus_that_are_hidden_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 4)
    for visible, count in (("", 0), ("2", 1), ("0,1,3", 3), ("0,1,2,3,4,5", 4)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert config.cuda_devices() == count
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert engine_config_from_env(checkpoint="anywhere").device == "cpu"


@pytest.mark.parametrize("gpus", [0, 1])
def test_the_small_checkpoint_is_served_by_default_on_either_device(
    monkeypatch: pytest.MonkeyPatch, gpus: int
) -> None:
    machine(monkeypatch, gpus)
    settings = launcher._with_checkpoint({})
    assert settings[env.CHECKPOINT.name].endswith("checkpoints/tiny")
    assert env.DEVICE.name not in settings  # the engine's own default
    assert (env.PAGES.name in settings) == (gpus == 0)
    assert launcher._with_checkpoint({env.DEVICE.name: "cpu"})[env.PAGES.name] == "129"
