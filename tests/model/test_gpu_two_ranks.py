# SPDX-License-Identifier: Apache-2.0
"""A whole forward on two GPUs: kernels over peers' memory and NCCL, against the golden, against one
GPU, and bit for bit between the ranks."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch
from torch import Tensor

from glmserve import env
from glmserve.kernels.dispatch import allow_reference
from glmserve.model.caches import CacheFormat
from glmserve.parallel.torch_group import TorchGroup
from tests.golden import forward
from tests.model.forward_golden import (
    Run,
    check_choices,
    check_states,
    load_golden,
    load_model,
    run,
)
from tests.model.kernel_launches import launched
from tests.tolerances import assert_close

PEER_ROWS = 100  # the first prefill chunk has more and goes through NCCL
FORMS: list[tuple[bool, CacheFormat, str]] = [
    (False, "model", "forward_bf16"),
    (True, "fp8", "forward_fp8"),
]


def _states(result: Run) -> Tensor:
    parts = (*result.final_hidden, *result.mtp_hidden)
    return torch.cat([part.flatten() for part in parts])


def _rank_main(rank: int, size: int, port: int, directory: str) -> None:
    import torch.distributed as dist

    for name, value in env.REQUIRED_CHILD_ENV.items():
        assert os.environ.get(name) == value, name
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rank=rank, world_size=size, device_id=device)
    allow_reference(False)
    group, golden = TorchGroup(rank, size), load_golden("pair")
    group.share_memory(PEER_ROWS, forward.CONFIGS["pair"]["hidden_size"])
    for fp8, cache, key in FORMS:
        place = Path(directory) / key
        model = load_model(place, "pair", torch.bfloat16, device, cache, fp8, group)
        with launched() as kernels:
            result = run(model, "pair", golden)
        assert kernels["one_shot"] > 0
        assert (kernels["two_shot"] > 0) == (size > 2)
        check_states(golden, result, key)
        check_choices(golden, result, key)
        mine = _states(result).to(device)
        everyone = group.all_gather(mine)
        assert all(torch.equal(everyone[0], other) for other in everyone[1:])
        alone = run(load_model(place, "pair", torch.bfloat16, device, cache, fp8), "pair", golden)
        for name in ("final_hidden", "mtp_hidden"):
            got, want = (torch.cat(getattr(r, name)) for r in (result, alone))
            distance = (got - want).norm(dim=-1) / want.norm(dim=-1)
            print(f"rank {rank} {key} {name}: {float(distance.max()):.4f} from one GPU", flush=True)
            assert_close(name, torch.zeros_like(distance), distance, key)
    dist.destroy_process_group()


@pytest.mark.gpu
def test_two_gpus_give_what_one_gives(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs that see each other")
    for fp8, _, key in FORMS:
        forward.write_checkpoint(tmp_path / key, "pair", fp8)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(_rank_main, (2, port, str(tmp_path)), nprocs=2)
