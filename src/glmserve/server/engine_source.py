# SPDX-License-Identifier: Apache-2.0
"""Where glm_dsa gets its tokens: the engine, or a scripted source that a setting names.

A scripted source lets the whole server run without a model, for tests of the stages and for
measuring what they cost.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from glmserve.config import EngineConfig
from glmserve.engine.client import EngineClient
from glmserve.errors import ConfigError
from glmserve.messages import Chunk, EngineStats, Request


class EngineSource(Protocol):
    """What the stage needs of an engine; `engine.client.EngineClient` says what each one means."""

    @property
    def stats(self) -> EngineStats | None: ...

    def submit(self, request: Request) -> None: ...
    def cancel(self, uid: str) -> None: ...
    def cancel_all(self) -> None: ...
    def receive(self, timeout: float | None = None) -> list[Chunk]: ...
    def close(self, timeout: float = 8.0) -> None: ...


StartEngine = Callable[[EngineConfig, Callable[[str], None] | None], EngineSource]


def engine_starter(spec: str) -> StartEngine:
    """`EngineClient.start`, or the `start` of what GLMSERVE_ENGINE names (see `env.ENGINE`)."""
    if not spec:
        return EngineClient.start
    where, _, name = spec.rpartition(":")
    if where.endswith(".py"):
        found = importlib.util.spec_from_file_location(Path(where).stem, where)
        if found is None or found.loader is None:
            raise ConfigError("GLMSERVE_ENGINE", spec, "is not a Python file")
        module = importlib.util.module_from_spec(found)
        sys.modules[found.name] = module  # dataclasses look their own module up
        found.loader.exec_module(module)
    else:
        module = importlib.import_module(where)
    start: StartEngine = getattr(module, name).start
    return start
