# SPDX-License-Identifier: Apache-2.0
"""Errors of the ipc room. A wait that runs into its deadline raises the builtin TimeoutError."""

from __future__ import annotations

from glmserve.errors import EngineError


class Aborted(EngineError):
    """Somebody called abort() on the shared object: a peer died or the engine is closing."""


class MessageTooLarge(EngineError):
    """A message that a ring of this capacity can never hold."""
