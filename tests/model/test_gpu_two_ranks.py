# SPDX-License-Identifier: Apache-2.0
"""A whole forward on two GPUs: kernels over peers' memory and NCCL, against the golden, against one
GPU, and bit for bit between the ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from glmserve.cache_format import CacheFormat
from glmserve.kernels.dispatch import allow_reference
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
from tests.two_gpus import needs_two_gpus, on_two_gpus

PEER_ROWS = 100  # the first prefill chunk has more and goes through NCCL
FORMS: list[tuple[bool, CacheFormat, str]] = [
    (False, "model", "forward_bf16"),
    (True, "fp8", "forward_fp8"),
]


def _states(result: Run) -> Tensor:
    parts = (*result.final_hidden, *result.mtp_hidden)
    return torch.cat([part.flatten() for part in parts])


def _run(rank: int, directory: Path) -> None:
    device = torch.device("cuda", rank)
    allow_reference(False)
    group, golden = TorchGroup(rank, 2), load_golden("pair")
    group.share_memory(PEER_ROWS, forward.CONFIGS["pair"]["hidden_size"])
    for fp8, cache, key in FORMS:
        place = directory / key
        model = load_model(place, "pair", torch.bfloat16, device, cache, fp8, group)
        with launched() as kernels:
            result = run(model, "pair", golden)
        assert kernels["one_shot"] > 0
        assert kernels["two_shot"] == 0  # for more ranks
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


@pytest.mark.gpu
@needs_two_gpus
def test_two_gpus_give_what_one_gives(tmp_path: Path) -> None:
    for fp8, _, key in FORMS:
        forward.write_checkpoint(tmp_path / key, "pair", fp8)
    on_two_gpus(_run, tmp_path)
