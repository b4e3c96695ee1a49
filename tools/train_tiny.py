#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains checkpoints/tiny: python tools/train_tiny.py --out DIR [--resume DIR] [--seconds N].

One H200 or a CPU (slowly; `--sizes trial` for a look). It ends by the clock, saves on the way, and
goes on from saved weights with `--resume`. Course: dense attention while the indexers learn its
distribution, then top-k in part of the rows; the rate is held, then falls to the end.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from glmserve.model_config import ModelConfig
from tools.tiny import decode, export
from tools.tiny.objective import Batch, Runner, accepted_length, ahead
from tools.tiny.optimiser import Optimiser, rate_factor
from tools.tiny.tokens import Encoder, rows
from tools.tiny.twin import Moe, Twin

DRAFT_WEIGHT = 0.3
BIAS_RATE = 4e-3  # of the routers' balance, a step
REPORT = 10.0  # seconds


class Data(IterableDataset):  # type: ignore[type-arg]
    """Batches of packed rows; each worker has a seed of its own."""

    def __init__(self, directory: Path, seed: int, width: int, count: int, longest: int) -> None:
        self.arguments = (seed, width, count, longest)
        self.directory = directory

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        info = get_worker_info()
        seed, width, count, longest = self.arguments
        number = info.id if info else 0
        encoder = Encoder.of(self.directory)
        for r in rows(encoder, seed * 1000 + number, width, count, longest):
            arrays = (r.ids, r.positions, r.documents, r.weights)
            yield tuple(torch.from_numpy(array) for array in arrays)


def main() -> None:
    args = _arguments()
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    args.out.mkdir(parents=True, exist_ok=True)
    if args.resume:
        config = export.same_config(args.resume, args.out)
    else:
        config = export.new_config(args.out, args.sizes)
    twin = Twin(config, args.seed)
    if args.resume:
        export.load_weights(twin, args.resume)
    twin.to(device)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    wrap: Callable[[Any], Any] = (
        (lambda f: torch.compile(f, dynamic=False)) if args.compile else (lambda f: f)
    )
    torch._dynamo.config.recompile_limit = 64
    if device == "cuda":
        torch.set_float32_matmul_precision("high")
    seed = args.seed + (500 if args.resume else 0)  # other conversations than before
    data = DataLoader(
        Data(args.out, seed, args.width, args.rows, args.longest),
        batch_size=None,
        num_workers=args.workers,
        prefetch_factor=4 if args.workers else None,
        pin_memory=device == "cuda",
    )
    trainer = Trainer(args, config, twin, Runner(twin, dtype, wrap), device)
    batches = iter(data)
    trainer.run(batches)
    export.save_weights(twin, args.out)
    trainer.runner = Runner(twin, dtype)
    trainer.say(trainer.compare(next(batches)))
    if args.evaluate:
        trainer.say(trainer.evaluate(args.evaluate))
    os._exit(0)  # the workers are in the middle of batches that nobody wants


class Trainer:
    def __init__(
        self, args: argparse.Namespace, config: ModelConfig, twin: Twin, runner: Runner, device: str
    ) -> None:
        self.args, self.config, self.twin = args, config, twin
        self.runner, self.device = runner, device
        self.optimiser = Optimiser(twin, args.matrix_rate, args.other_rate)
        self.log = (args.out / "log.jsonl").open("a", encoding="utf-8")
        self.start = time.monotonic()
        self.step = 0

    def say(self, values: dict[str, Any]) -> None:
        line = json.dumps(
            {k: round(v, 4) if isinstance(v, float) else v for k, v in values.items()}
        )
        self.log.write(line + "\n")
        self.log.flush()
        print(line, flush=True)

    def run(self, batches: Iterator[tuple[Tensor, ...]]) -> None:
        args = self.args
        for warm in range(2):  # both phases are compiled before the clock runs
            self._losses(self._batch(next(batches)), bool(warm))["loss"].backward()
            self.twin.zero_grad(set_to_none=True)
        self._synchronise()
        self.say({"prepared_s": time.monotonic() - self.start})
        begin = reported = time.monotonic()
        saved, counted, waited = begin, 0, 0.0
        sums: dict[str, Tensor] = {}
        while True:
            now = time.monotonic()
            progress = max((now - begin) / args.seconds, self.step / args.steps)
            if progress >= 1:
                break
            raw = next(batches)
            waited += time.monotonic() - now
            sparse = progress >= args.dense
            losses = self._losses(self._batch(raw), sparse)
            losses["loss"].backward()
            self.optimiser.step(rate_factor(progress, self.step, hold=args.hold) * args.scale)
            for name, value in losses.items():
                sums[name] = sums.get(name, 0.0) + value.detach()
            self.step += 1
            counted += 1
            if self.step % 8 == 0 and self.device == "cuda":
                torch.cuda.current_stream().synchronize()  # the clock above is then the device's
            now = time.monotonic()
            if now - reported > REPORT:
                report = {name: float(value) / counted for name, value in sums.items()}
                speed = counted * args.rows * args.width / (now - reported)
                done = int(20 * progress)
                print(f"[{'#' * done}{'.' * (20 - done)}] {progress:4.0%} step {self.step}")
                self.say(
                    {
                        "t": now - begin,
                        "step": self.step,
                        "tok/s": int(speed),
                        "waited": waited,
                        "sparse": sparse,
                        **report,
                    }
                )
                sums, counted, reported, waited = {}, 0, now, 0.0
            if now - saved > args.save_every:
                export.save_weights(self.twin, self.args.out)
                saved = now

    def _synchronise(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def _batch(self, raw: tuple[Tensor, ...]) -> Batch:
        ids, positions, documents, weights = (t.to(self.device, non_blocking=True) for t in raw)
        return Batch(ids.long(), positions.long(), documents.long(), weights.float())

    def _losses(self, batch: Batch, sparse: bool) -> dict[str, Tensor]:
        """`loss` to follow, and what it is made of; also moves the routers' biases."""
        count = len(batch.ids)
        chosen, drafting = max(1, count * 3 // 8), max(2, count // 2)
        probe = max(1, count // 20)
        probed = slice(max(0, chosen - probe), min(chosen + probe, drafting))
        out = self.runner.forward(batch, chosen if sparse else 0, probed, drafting)
        head = self.twin.lm_head
        main, right = self.runner.losses(head, out.hidden, *ahead(batch, 1, count))
        values = {"main": main, "right": right}
        loss = main
        for k, hidden in enumerate(out.drafts, 1):
            draft, right = self.runner.losses(head, hidden, *ahead(batch, k + 1, drafting))
            values |= {f"draft{k}": draft, f"right{k}": right}
            loss = loss + DRAFT_WEIGHT / len(out.drafts) * draft
        divergence = torch.stack(out.divergence).mean()
        values["kl"] = divergence
        for number, load in out.loads.items():
            mlp = self.twin.layers[number].mlp
            assert isinstance(mlp, Moe)
            mlp.bias += BIAS_RATE * (load.mean() - load).sign()
        values["unbalance"] = torch.stack(
            [load.max() / load.mean() for load in out.loads.values()]
        ).mean()
        return {"loss": loss + divergence, **values}

    @torch.no_grad()
    def compare(self, raw: tuple[Tensor, ...]) -> dict[str, Any]:
        """On one batch: how often top-k changes the choice, and the length that drafts reach."""
        batch = self._batch(raw)
        count = len(batch.ids)
        sparse = self.runner.forward(batch, count, None, count)
        dense = self.runner.forward(batch, 0, None, 0)
        own = (ahead(batch, 1, count)[1] == 1) & (batch.positions >= self.config.index_topk)
        same = self.twin.logits(sparse.hidden).argmax(-1) == self.twin.logits(dense.hidden).argmax(
            -1
        )
        return {
            "sparse_equals_dense": float(same[own].float().mean()),
            "compared": int(own.sum()),
            "accepted_length": float(accepted_length(self.twin, batch, sparse, count)),
        }

    def evaluate(self, count: int) -> dict[str, Any]:
        eager = Runner(self.twin, self.runner.dtype)
        encoder = Encoder.of(self.args.out)
        start = time.monotonic()
        out: dict[str, Any] = decode.scores(eager, encoder, count, 99, self.device)
        return {
            "scores": {k: round(v, 3) for k, v in out.items()},
            "evaluated_s": time.monotonic() - start,
            "steps": self.step,
        }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path, help="go on from the weights there")
    parser.add_argument("--sizes", default="tiny", choices=["tiny", "trial"])
    parser.add_argument("--seconds", type=float, default=480.0, help="of training, then it ends")
    parser.add_argument("--steps", type=int, default=10**9, help="or after so many steps")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rows", type=int, default=60)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--longest", type=int, default=3000, help="characters of a context")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--dense", type=float, default=0.5, help="share before top-k begins")
    parser.add_argument("--hold", type=float, default=0.5, help="share before the rate falls")
    parser.add_argument("--scale", type=float, default=1.0, help="of both rates")
    parser.add_argument("--matrix-rate", type=float, default=0.02)
    parser.add_argument("--other-rate", type=float, default=0.003)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--save-every", type=float, default=60.0)
    parser.add_argument("--evaluate", type=int, default=64, help="held-out prompts a task")
    return parser.parse_args()


if __name__ == "__main__":
    main()
