# SPDX-License-Identifier: Apache-2.0
"""How the stages get their settings: GLMSERVE_* variables, else parameters of config.pbtxt.

Every stage calls `apply_parameters` first; after that `env` is the only source, here and in the
processes that the stage starts.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from glmserve import env
from glmserve.config import EngineConfig, engine_config_from_env
from glmserve.errors import ConfigError
from glmserve.model_config import ModelConfig


def apply_parameters(model_config: str) -> None:
    """Sets variables that the environment leaves unset from the model's `parameters`.

    `model_config` is the JSON that the server gives to `initialize`. A parameter `checkpoint`
    stands for GLMSERVE_CHECKPOINT; an empty value is unset; an unknown one is a ConfigError.
    """
    for key, value in json.loads(model_config).get("parameters", {}).items():
        name = "GLMSERVE_" + key.upper()
        if name not in env.REGISTRY:
            raise ConfigError(key, value["string_value"], "unknown parameter in config.pbtxt")
        if value["string_value"] and not os.environ.get(name):
            os.environ[name] = value["string_value"]


def engine_config() -> EngineConfig:
    """The engine's settings with `max_model_len` filled in, as every stage must see them."""
    config = engine_config_from_env()
    model = ModelConfig.from_file(Path(config.checkpoint) / "config.json")
    return config.with_limits(model.max_position_embeddings)
