# SPDX-License-Identifier: Apache-2.0
"""A test's work on two GPUs: a process each, with NCCL between them."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from multiprocessing import resource_tracker
from unittest import mock

import pytest
import torch

from glmserve.config import cuda_devices

needs_two_gpus = pytest.mark.skipif(cuda_devices() < 2, reason="needs two GPUs")


def on_two_gpus(work: Callable[..., None], *args: object) -> None:
    """Runs work(rank, *args) on both; raises what a rank raised. `work` is a module's function."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with mock.patch.dict(os.environ, meeting):
        torch.multiprocessing.spawn(_rank_main, (work, args), nprocs=2)
    # Python's own helper of spawned processes would stay until this process ends.
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


def _rank_main(rank: int, work: Callable[..., None], args: tuple[object, ...]) -> None:
    import torch.distributed as dist

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rank=rank, world_size=2, device_id=device)
    work(rank, *args)
    dist.destroy_process_group()
