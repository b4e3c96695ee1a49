# SPDX-License-Identifier: Apache-2.0
"""Ranks and what they exchange. Importing this package, or `launcher`, imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from glmserve.parallel.group import Group
    from glmserve.parallel.rank_spec import RankSpec


def make_group(spec: RankSpec) -> Group:
    """Opens this rank's end of the group that `spec` describes; blocks until all have joined.

    Raises TimeoutError when a peer does not come within `spec.timeout_s`, Aborted when one died.
    """
    from glmserve.parallel.group import SingleGroup

    if spec.size == 1:
        return SingleGroup()
    if spec.collectives == "shm":
        from glmserve.parallel.segment import GroupSegment
        from glmserve.parallel.shm_group import SharedMemoryGroup

        segment = GroupSegment.attach(spec.group_fd)
        group: Group = SharedMemoryGroup(segment, spec.rank, spec.timeout_s, spec.library_fd)
    else:
        from glmserve.parallel.torch_group import TorchGroup

        group = TorchGroup.join(
            spec.collectives, spec.rank, spec.size, spec.store_port, spec.group_fd, spec.timeout_s
        )
    group.barrier()
    return group
