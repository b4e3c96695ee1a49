# SPDX-License-Identifier: Apache-2.0
"""What a rank process is told when it starts, and how it opens its ends. No torch.

The launcher puts one JSON object on the command line (`ps` then shows who is which rank); all
descriptors in it are inherited under the same numbers.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Self

from glmserve.config import Collectives
from glmserve.ipc.process import watch_heartbeat
from glmserve.ipc.ring import BroadcastRing


@dataclass(frozen=True)
class RankSpec:
    """One rank's start parameters."""

    rank: int
    size: int
    collectives: Collectives
    engine: str  # EngineConfig as JSON
    heartbeat_fd: int  # reads EOF when the launcher closes or its process dies
    plan_fd: int  # ring: engine -> all ranks
    result_fd: int  # ring: rank 0 -> engine; -1 on the other ranks
    group_fd: int  # shm: the segment; gloo/nccl: rank 0's listening socket, -1 on the others
    library_fd: int  # shm: the compiled collectives; -1 otherwise
    store_port: int  # gloo/nccl: port of that socket on 127.0.0.1; 0 for shm
    timeout_s: float  # longest wait for a peer in one collective

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))

    def watch_parent(self) -> None:
        """Starts the thread that ends this process with its launcher. The first call of main()."""
        watch_heartbeat(self.heartbeat_fd)

    def open_plans(self) -> BroadcastRing:
        """Opens this rank's reading end of the plan ring; it starts at the first plan."""
        return BroadcastRing.attach_reader(self.plan_fd, self.rank)

    def open_results(self) -> BroadcastRing | None:
        """Opens the writing end of the result ring on rank 0; None on the others."""
        return BroadcastRing.attach_writer(self.result_fd) if self.rank == 0 else None
