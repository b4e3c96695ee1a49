# SPDX-License-Identifier: Apache-2.0
"""What other threads put into the queue of glm_dsa's sender thread (see `glm_stage.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from glmserve.errors import GlmServeError
from glmserve.messages import Chunk
from glmserve.server.running import Responder
from glmserve.server.stage_messages import TokensRequest


@dataclass(frozen=True)
class Submit:
    """A parsed request; `arrived` is time.monotonic()."""

    source: TokensRequest
    responder: Responder
    arrived: float


@dataclass(frozen=True)
class Refuse:
    """A request that could not be parsed, or found the stage closed."""

    error: GlmServeError
    responder: Responder


@dataclass(frozen=True)
class CancelRequest:
    """A client wants another request ended, and an answer that says whether it was running."""

    uid: str
    responder: Responder


@dataclass(frozen=True)
class Relayed:
    """A message from the relay socket."""

    message: Mapping[str, Any]


@dataclass(frozen=True)
class Failed:
    """The engine has died."""

    reason: str


class Close:
    """Nothing follows."""


Event = Submit | Refuse | CancelRequest | Relayed | list[Chunk] | Failed | Close
