# SPDX-License-Identifier: Apache-2.0
"""A rank process: `python -m glmserve.runtime.rank SPEC`, started by `parallel.launcher`.

Loads this rank's share of the checkpoint, then runs every plan that arrives. Rank 0 reports the
results. An exception ends the process: the launcher tells the engine which rank died and why.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import cast

import torch

from glmserve import env
from glmserve.cache_format import choose_format
from glmserve.checkpoint.reader import open_share
from glmserve.checkpoint.share import Share
from glmserve.checkpoint.synthetic_weights import synthetic_share
from glmserve.config import PAGE_SIZE, EngineConfig
from glmserve.errors import ConfigError, GlmServeError
from glmserve.ipc.errors import Aborted
from glmserve.ipc.ring import BroadcastRing
from glmserve.kernels.dispatch import allow_reference
from glmserve.kernels.pdl import use_pdl
from glmserve.messages import Progress, RanksReady, StepMasks, decode, encode
from glmserve.model.caches import Caches
from glmserve.model.decoder import Decoder
from glmserve.model.mtp import Mtp
from glmserve.model_config import ModelConfig
from glmserve.parallel import make_group
from glmserve.parallel.group import Group
from glmserve.parallel.rank_spec import RankSpec
from glmserve.parallel.torch_group import TorchGroup
from glmserve.runtime.capture import Capture
from glmserve.runtime.result_sender import ResultSender
from glmserve.runtime.sampler import Sampler
from glmserve.runtime.step import StepRunner, most_rows

_PEER_ROWS = 2048  # rows of a boundary over peers' memory; larger ones go through NCCL
LEAST_CAPABILITY = (9, 0)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def check_gpu(device: torch.device) -> None:
    """Raises ConfigError on a GPU that the kernels are not made for."""
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        least, found = (".".join(map(str, pair)) for pair in (LEAST_CAPABILITY, capability))
        name = torch.cuda.get_device_name(device)
        reason = f"the kernels need compute capability {least} (H100, H200), {name} has {found}"
        raise ConfigError("device", "cuda", reason)


def build(
    config: EngineConfig, group: Group, plans: BroadcastRing, results: BroadcastRing | None
) -> tuple[StepRunner, RanksReady]:
    """Loads weights and allocates caches; the same on every rank."""
    device = torch.device("cuda:0" if config.device == "cuda" else "cpu")
    dtype = DTYPES[config.dtype]
    if device.type == "cuda" and dtype == torch.bfloat16:
        check_gpu(device)
    model = ModelConfig.from_file(Path(config.checkpoint) / "config.json")

    def progress(line: str) -> None:
        if results is not None:
            results.send(encode(Progress(line)))

    allow_reference(config.allow_reference)
    use_pdl(env.PDL.get())
    with_mtp = config.drafts > 0
    cut = (group.rank, group.size, config.expert_layout, dtype, device, with_mtp)
    share: Share
    if config.synthetic:
        share = synthetic_share(config.checkpoint, *cut)
    else:
        share = open_share(config.checkpoint, model, *cut)
    weights = share.load(progress)
    wanted = share.memory_bytes
    print(
        f"{weights.parameter_bytes:,} parameter bytes, {wanted:,} by the shapes; {share.origin}",
        flush=True,
    )
    decoder = Decoder(model, weights, group, latent_norm_eps=config.latent_norm_eps)
    mtp = Mtp(model, weights, group, latent_norm_eps=config.latent_norm_eps) if with_mtp else None
    form = choose_format(config, model)
    caches = Caches.allocate(model, config.num_pages, PAGE_SIZE, dtype, device, form)
    sampler = Sampler(
        group,
        model.vocab_size // group.size,
        config.valid_tokens or model.vocab_size,
        device,
    )
    capture = Capture(config.capture_dir, group) if config.capture_dir else None

    def fetch_masks() -> StepMasks:
        return cast(StepMasks, decode(plans.recv()))

    if isinstance(group, TorchGroup) and device.type == "cuda":
        group.share_memory(min(_PEER_ROWS, most_rows(config)), model.hidden_size)
    runner = StepRunner(config, decoder, mtp, caches, sampler, device, fetch_masks, capture)
    runner.prepare(progress)
    counts = group.all_gather(torch.tensor([weights.parameter_bytes, wanted], device=device))
    everyone = counts.tolist()
    return runner, RanksReady(tuple(c[0] for c in everyone), tuple(c[1] for c in everyone))


def main() -> int:
    spec = RankSpec.from_json(sys.argv[1])
    spec.watch_parent()
    torch.set_num_threads(1)
    plans, results = spec.open_plans(), spec.open_results()
    try:
        group = make_group(spec)
        config = EngineConfig.from_json(spec.engine)
        runner, ready = build(config, group, plans, results)
        sender = None
        if results is not None:
            results.send(encode(ready))
            sender = ResultSender(results, threaded=config.device == "cuda")
        while True:
            pending = runner.run(decode(plans.recv()))
            if sender is not None:
                sender.put(pending)
    except Aborted:
        return 1  # another rank died, or the engine is closing; the launcher knows
    except GlmServeError as error:  # says what is wrong by itself; anything else shows where
        print(error, file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
