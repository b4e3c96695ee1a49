# SPDX-License-Identifier: Apache-2.0
"""GLM-5.2 cut down to a few layers on two GPUs, with real collectives: against one GPU, and timed.

Two processes hold a half each and a whole one beside it. Both compute the same decode step; the
halves take the whole one's choices of positions and experts, so that only rounding differs. Then
the step is captured twice: layer boundaries over peers' memory, and through NCCL. `python3
bench/two_ranks.py --json FILE`; needs 40 GB on each GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
os.environ.update(
    NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1", NVSHMEM_DISABLE_NVLS="1"
)

import torch
import torch.distributed as dist
from torch import Tensor

from glmserve.checkpoint.declared import CONFIGS, open_source
from glmserve.config import EngineConfig
from glmserve.model.step import Selection, Step
from glmserve.model.taps import Routing, Taps
from glmserve.parallel.group import Group, SingleGroup
from glmserve.parallel.torch_group import TorchGroup
from glmserve.runtime.lone_rank import LoneRank, open_rank, pages_of
from glmserve.runtime.rank_bench import Case, Decode, machine, timed

CONTEXT, DRAFTS = 8192, 5
WORST = 0.2  # of a row's length, block-fp8: what tests/tolerances.py allows a whole forward


class Forced(Taps):
    """Puts another run's choices in place of a model's own."""

    def __init__(self, wanted: Taps, full_layers: tuple[int, ...]) -> None:
        super().__init__()
        self._selections = [wanted.selections[layer] for layer in full_layers]
        self._routing = list(wanted.routing)
        self.moved = 0  # choices of experts that differed
        self.experts = 0

    def selected(self, own: Selection, step: Step) -> Selection:
        return self._selections.pop(0)

    def routed(self, own: Routing) -> Routing:
        wanted = self._routing.pop(0)
        self.moved += int((own.ids != wanted.ids).sum())
        self.experts += own.ids.numel()
        return wanted


def cut_down(layers: int, path: Path) -> str:
    """GLM-5.2's config with its first layers only, every second routed one full."""
    raw: dict[str, Any] = json.loads((CONFIGS / "glm-5.2-fp8.json").read_text(encoding="utf-8"))
    dense = raw["first_k_dense_replace"]
    kinds = ["full"] * dense + ["shared" if i % 2 == 0 else "full" for i in range(layers - dense)]
    raw |= {"num_hidden_layers": layers, "indexer_types": kinds}
    if "mlp_layer_types" in raw:
        raw["mlp_layer_types"] = raw["mlp_layer_types"][:layers]
    path.write_text(json.dumps(raw), encoding="utf-8")
    return str(path)


def opened(config: str, group: Group, requests: int) -> LoneRank:
    settings = EngineConfig(
        config, ranks=group.size, device="cuda", dtype="bf16", collectives="nccl", synthetic=True,
        drafts=DRAFTS, max_rows=requests,
    )  # fmt: skip
    pages = 1 + requests * pages_of(CONTEXT, DRAFTS)
    return open_rank(open_source(config, files=False), settings, group, pages, 0, lambda line: None)


@torch.inference_mode()
def compared(alone: LoneRank, together: LoneRank, rows: int) -> dict[str, Any]:
    """The halves' hidden rows against the whole one's, and each other's."""
    case = Case(rows, CONTEXT, DRAFTS)
    one, two = Decode(alone, case), Decode(together, case)
    taps = Taps()
    want = one.runner.forward(one.requests.layout, taps)[0]
    forced = Forced(taps, alone.source.config.full_layers)
    got = two.runner.forward(two.requests.layout, forced)[0]
    distance = (got.float() - want.float()).norm(dim=1) / want.float().norm(dim=1)
    return {
        "worst_row": round(float(distance.max()), 4),
        "median_row": round(float(distance.median()), 4),
        "experts_chosen_differently": round(forced.moved / forced.experts, 4),
        "same_bits_on_both": _same(together.group, got),
        "right": bool(distance.max() < WORST) and _same(together.group, got),
    }


def _same(group: Group, x: Tensor) -> bool:
    everyone = group.all_gather(x)
    return all(torch.equal(everyone[0], other) for other in everyone[1:])


def steps(together: LoneRank, group: TorchGroup, rows: int) -> dict[str, float]:
    """Milliseconds of the captured step, of the slower rank, with each kind of boundary."""
    found, peers = {}, group.peers
    for name in ("peers", "nccl"):
        group.peers = peers if name == "peers" else None
        decode = Decode(together, Case(rows, CONTEXT, DRAFTS))
        for part, step in decode.prepare().items():
            group.barrier()
            ms = timed(step, decode.device, before=decode.requests.place)
            slowest = torch.tensor(ms, device="cuda")
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            found[f"{part}_{name}_ms"] = round(float(slowest), 3)
    group.peers = peers
    return found


def rank_main(rank: int, port: int, config: str, rows: list[int], output: Path | None) -> None:
    started = time.perf_counter()
    # As the launcher has it: each rank sees one GPU, as cuda:0.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        CUDA_VISIBLE_DEVICES=visible[rank],
        TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES="1",
    )
    dist.init_process_group("nccl", rank=rank, world_size=2, device_id=torch.device("cuda:0"))
    group = TorchGroup(rank, 2)
    group.share_memory(2048, 6144)
    requests = max(rows) // (DRAFTS + 1)
    together, alone = opened(config, group, requests), opened(config, SingleGroup(), requests)
    if rank == 0:
        print(f"loaded after {time.perf_counter() - started:.1f} s", flush=True)
    table = []
    for count in rows:
        row: dict[str, Any] = {"rows": count, "context": CONTEXT, "drafts": DRAFTS}
        row |= compared(alone, together, count)
        row |= steps(together, group, count)
        table.append(row)
        if rank == 0:
            print(f"{time.perf_counter() - started:.1f} s", row, flush=True)
    if rank == 0 and output is not None:
        layers = together.source.config.num_hidden_layers
        record = machine("cuda") | {"date": time.strftime("%Y-%m-%d"), "layers": layers}
        output.write_text(json.dumps(record | {"rows": table}, indent=1) + "\n", encoding="utf-8")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--rows", type=int, nargs="*", default=[6, 192])
    parser.add_argument("--port", type=int, default=29519)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        config = cut_down(args.layers, Path(directory) / "config.json")
        torch.multiprocessing.spawn(rank_main, (args.port, config, args.rows, args.json), nprocs=2)


if __name__ == "__main__":
    main()
