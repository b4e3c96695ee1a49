# SPDX-License-Identifier: Apache-2.0
"""Typed errors. Each carries a KServe-style status `code` so that the server edge maps it once.

Messages name the field (or configuration key) and the offending value; they never show paths of
the host to a client, which is why checkpoint errors are raised at start-up only.
"""

from __future__ import annotations

from typing import Any, ClassVar

_SHOWN = 120  # characters of an offending value that a message repeats


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


class GlmServeError(Exception):
    """Base of every error that the project raises on purpose."""

    code: ClassVar[str] = "INTERNAL"


class InvalidInput(GlmServeError):
    """A request field that a client must change; raised before anything is allocated."""

    code = "INVALID_ARG"

    def __init__(self, field: str, value: Any, reason: str) -> None:
        super().__init__(f"{field}: {reason} (got {_shown(value)})")
        self.field, self.value, self.reason = field, value, reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.field, self.value, self.reason)


class ConfigError(GlmServeError):
    """A key of a checkpoint's config.json or of the engine's settings that cannot be served."""

    code = "INVALID_ARG"

    def __init__(self, key: str, value: Any, reason: str) -> None:
        super().__init__(f"{key} = {_shown(value)}: {reason}")
        self.key, self.value, self.reason = key, value, reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.key, self.value, self.reason)


class CheckpointError(GlmServeError):
    """A checkpoint whose tensors do not match its configuration; names the tensor."""


class Unavailable(GlmServeError):
    """The server refuses work now (queue full, closing); the same request may succeed later."""

    code = "UNAVAILABLE"


class EngineError(GlmServeError):
    """The engine or one of its ranks failed; no request can be served any more."""
