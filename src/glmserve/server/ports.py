# SPDX-License-Identifier: Apache-2.0
"""Chooses the server's three ports, and says which one is taken before the server fails on it."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass

from glmserve.errors import GlmServeError


class PortBusy(GlmServeError):
    """A wanted port cannot be listened on; the message names it and the option that moves it."""


@dataclass(frozen=True)
class Ports:
    """Where the server listens."""

    host: str
    http: int
    grpc: int
    metrics: int


def choose_ports(host: str, http: int, grpc: int, metrics: int) -> Ports:
    """Returns the ports, with a free one for each 0. Raises PortBusy.

    All three are held while choosing, so that they differ; they are free again on return, and
    another program may be quicker than the server.
    """
    chosen = {}
    with contextlib.ExitStack() as held:
        for name, port in (("http", http), ("grpc", grpc), ("metrics", metrics)):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((host, port))
                listener.listen(1)
            except (OSError, OverflowError) as error:
                raise PortBusy(
                    f"{name} port {port} on {host} cannot be used ({error}); "
                    f"choose another one with --{name}-port, 0 for any free one"
                ) from None
            chosen[name] = listener.getsockname()[1]
    return Ports(host, **chosen)
