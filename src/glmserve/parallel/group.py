# SPDX-License-Identifier: Apache-2.0
"""What a group of ranks can do. One group object serves tensor and expert parallelism alike.

Sums are taken in rank order, accumulated in fp32 (fp64 for fp64, the type itself for integers) and
rounded once, whatever carries the bytes: indexer and router are replicated, so ranks that differ
in one bit would select different tokens and experts; and a sum whose order does not depend on the
message's size keeps a row's result independent of the rows beside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from glmserve.parallel.peer_memory import PeerBoundary


class Group(Protocol):
    """N ranks that call the same operations in the same order with the same shapes and dtypes.

    Every operation raises Aborted (or, in torch's backends, RuntimeError) when a peer is gone.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def peers(self) -> PeerBoundary | None:
        """The layer boundary over memory that the ranks' GPUs share, where the group has it."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Returns the sum over ranks in rank order, same shape and dtype; `x` is left alone."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """Returns [size, *x.shape]: every rank's `x` in rank order."""
        ...

    def broadcast(self, x: Tensor, src: int) -> Tensor:
        """Returns rank `src`'s `x`; on the others `x` gives the shape and dtype only."""
        ...

    def barrier(self) -> None:
        """Returns once every rank has called it."""
        ...

    def close(self) -> None:
        """Leaves the group."""
        ...


class SingleGroup:
    """The group of one rank: nothing is exchanged."""

    rank = 0
    size = 1
    peers: PeerBoundary | None = None

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x.unsqueeze(0)

    def broadcast(self, x: Tensor, src: int) -> Tensor:
        assert src == 0, src
        return x

    def barrier(self) -> None:
        pass

    def close(self) -> None:
        pass
