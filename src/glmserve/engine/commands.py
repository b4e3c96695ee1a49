# SPDX-License-Identifier: Apache-2.0
"""`glmserve logits`, `generate` and `bench`: requests through the same engine and ranks.

The commands see what the server sees (same processes, plans and rings); `logits` also has rank 0
record what every step computed.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from glmserve.config import PAGE_SIZE, EngineConfig, engine_config_from_env
from glmserve.engine import bench
from glmserve.engine.client import EngineClient
from glmserve.env import RANKS
from glmserve.errors import EngineError, InvalidInput
from glmserve.generation_config import GenerationConfig
from glmserve.messages import Chunk, IntArray, Request
from glmserve.sampling_params import SamplingParams
from glmserve.text.grammar import GrammarBuilder
from glmserve.text.output import OutputProcessor
from glmserve.text.output_constraint import take_constraint
from glmserve.text.prompt import PromptBuilder

DRAFTS = 5  # drafts that `logits --mtp` reports, as the golden does

Arrays = dict[str, npt.NDArray[Any]]


def add_subcommands(subparsers: Any) -> None:
    """Adds `logits` and `generate`; each sets `args.run`."""
    logits = subparsers.add_parser("logits", help="logits and greedy tokens of a prompt, to a file")
    _engine_options(logits)
    logits.add_argument("--input-ids", required=True, help=".npy file of token ids, [T]")
    logits.add_argument("--out", required=True, help=".npz file to write")
    logits.add_argument("--new", type=int, default=1, help="greedy tokens to generate (default 1)")
    logits.add_argument("--mtp", action="store_true", help="also the MTP layer's draft tokens")
    logits.add_argument("--taps", action="store_true", help="also selections and chosen experts")
    logits.set_defaults(run=run_logits)

    generate = subparsers.add_parser("generate", help="complete one prompt and print the text")
    _engine_options(generate)
    generate.add_argument("--drafts", type=int, help="MTP draft tokens a step")
    generate.add_argument("--prompt", required=True, help="text, used as it is (no chat template)")
    generate.add_argument("--max-tokens", type=int, default=64)
    generate.add_argument("--temperature", type=float)
    generate.add_argument("--top-p", type=float)
    generate.add_argument("--top-k", type=int)
    generate.add_argument("--seed", type=int)
    generate.add_argument("--min-p", type=float)
    generate.add_argument("--min-tokens", type=int)
    generate.add_argument("--presence-penalty", type=float)
    generate.add_argument("--frequency-penalty", type=float)
    generate.add_argument("--repetition-penalty", type=float)
    generate.add_argument("--logprobs", type=int, help="alternatives reported with each token")
    generate.add_argument("--ignore-eos", action="store_true")
    generate.add_argument("--response-format", metavar="JSON", help="OpenAI's object")
    generate.add_argument("--structured-outputs", metavar="JSON", help="vLLM's object")
    generate.add_argument("--pages", type=int, help="cache pages of 64 tokens")
    generate.add_argument("--max-rows", type=int, help="sequences that run at the same time")
    generate.add_argument("--repeat", type=int, default=1, help="run it again: prefix hits")
    generate.add_argument(
        "--batch-with", type=int, default=0, metavar="N", help="run beside N random requests"
    )
    generate.add_argument("--json", action="store_true", help="print one JSON object instead")
    generate.set_defaults(run=run_generate)

    measured = subparsers.add_parser(
        "bench", help="tokens a step with MTP drafts, on held-out chats"
    )
    _engine_options(measured)
    measured.add_argument("--acceptance", action="store_true", help="what to measure")
    measured.add_argument("--drafts", type=int, default=3, help="MTP draft tokens a step")
    measured.add_argument("--prompts", help="JSON lines (default: the checkpoint's held_out.jsonl)")
    measured.add_argument("--limit", type=int, help="prompts taken, spread over the file")
    measured.add_argument("--max-tokens", type=int, default=192)
    measured.add_argument("--max-rows", type=int, default=16, help="prompts at the same time")
    measured.set_defaults(run=_run_bench)


def _run_bench(args: argparse.Namespace) -> int:
    return bench.run_bench(args, _engine_config(args, max_rows=args.max_rows))


def _engine_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--ranks", type=int, help="rank processes (default: 1, or one a GPU)")
    parser.add_argument("--device", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", choices=["fp64", "fp32", "bf16"])
    parser.add_argument(
        "--synthetic", action="store_true", default=None, help="random weights, no files of them"
    )
    parser.add_argument("--chunk", type=int, help="prefill tokens a step")
    parser.add_argument("--expert-layout", choices=["ep", "sliced"])
    parser.add_argument("--collectives", choices=["shm", "gloo", "nccl"])
    parser.add_argument("--latent-norm-eps", type=float)
    parser.add_argument("--page-seed", type=int, help="hand out cache pages in a random order")


def _engine_config(args: argparse.Namespace, **fixed: Any) -> EngineConfig:
    names = ["checkpoint", "ranks", "device", "dtype", "chunk", "drafts", "expert_layout"]
    names += ["collectives", "latent_norm_eps", "page_seed", "synthetic"]
    given = {name: getattr(args, name, None) for name in names} | fixed
    config = engine_config_from_env(**given)
    if args.ranks is None and not RANKS.is_set() and config.device == "cpu":
        config = engine_config_from_env(**given | {"ranks": 1})
    return config


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def complete(client: EngineClient, prompt: IntArray, sampling: SamplingParams) -> Iterator[Chunk]:
    """Runs one request; yields its chunks. Raises EngineError when it ends with an error."""
    client.submit(Request("offline", prompt, sampling))
    while True:
        for chunk in client.receive():
            if chunk.uid != "offline":
                continue
            if chunk.finish_reason == "error":
                raise EngineError(chunk.error)
            yield chunk
            if chunk.finish_reason is not None:
                return


def _greedy(client: EngineClient, prompt: IntArray, new: int) -> list[int]:
    sampling = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
    return [token for chunk in complete(client, prompt, sampling) for token in chunk.token_ids]


def _recorded(config: EngineConfig) -> list[Arrays]:
    """The arrays of each step since the last call."""
    steps = []
    for path in sorted(Path(config.capture_dir).glob("step-*.npz")):
        with np.load(path) as arrays:
            steps.append(dict(arrays))
        path.unlink()
    return steps


def run_logits(args: argparse.Namespace) -> int:
    """Writes logits [T, V] fp32, greedy_tokens [new] and, if asked for, drafts and taps."""
    prompt = np.load(args.input_ids, allow_pickle=False)
    if not np.issubdtype(prompt.dtype, np.integer):
        raise InvalidInput("--input-ids", str(prompt.dtype), "must hold integers")
    prompt = prompt.reshape(-1).astype(np.int32)
    if args.new < 1:
        raise InvalidInput("--new", args.new, "must be at least 1")
    with tempfile.TemporaryDirectory(prefix="glmserve-logits-") as directory:
        config = _engine_config(
            args,
            capture_dir=directory,
            drafts=DRAFTS if args.mtp else 0,
            max_rows=1,
            num_pages=-(-(len(prompt) + args.new + 2 * DRAFTS + 1) // PAGE_SIZE) + 2,
            max_model_len=len(prompt) + args.new,
        )
        client = EngineClient.start(config, _progress)
        try:
            tokens = _greedy(client, prompt, args.new)
            out = _prefill_arrays(_recorded(config), len(prompt), args.taps)
            out["greedy_tokens"] = np.asarray(tokens)
            if args.mtp:
                # Drafts from the end: the last generated token is drawn again, then drafted on.
                context = np.concatenate([prompt, np.asarray(tokens[:-1], dtype=np.int32)])
                _greedy(client, context, 1)
                last = _recorded(config)[-1]
                out |= {key: last[key][0] for key in last if key.startswith("mtp_draft_")}
        finally:
            client.close()
    np.savez_compressed(args.out, **out)
    print(f"{args.out}: logits {list(out['logits'].shape)}, greedy {tokens}")
    return 0


def _prefill_arrays(steps: list[Arrays], length: int, taps: bool) -> Arrays:
    """Joins the prompt's rows of all steps, in position order; names and forms as in the golden."""
    positions = np.concatenate([step["positions"] for step in steps])
    keep = np.flatnonzero(positions < length)
    order = keep[np.argsort(positions[keep], kind="stable")]

    def join(name: str, axis: int) -> npt.NDArray[Any]:
        return np.concatenate([step[name] for step in steps], axis).take(order, axis)

    joined = {"logits": join("logits", 0).astype(np.float32)}
    if taps:
        joined["final_hidden"] = join("final_hidden", 0)
        joined["hidden_layers"] = join("hidden_layers", 1)
        joined["topk_mask"] = np.concatenate(
            [_mask(step["selected"], length) for step in steps], 1
        ).take(order, 1)
        if "router_experts" in steps[0]:
            ids = join("router_experts", 1)
            ascending = ids.argsort(-1)
            joined["moe_layers"] = steps[0]["moe_layers"]
            joined["router_experts"] = np.take_along_axis(ids, ascending, -1)
            joined["router_weights"] = np.take_along_axis(join("router_weights", 1), ascending, -1)
    return joined


def _mask(selected: npt.NDArray[Any], length: int) -> npt.NDArray[np.bool_]:
    """Selected positions [L, R, k], -1 unused, as a mask [L, R, length]."""
    mask = np.zeros((*selected.shape[:2], length + 1), dtype=bool)
    columns = np.where((selected >= 0) & (selected < length), selected, length)
    np.put_along_axis(mask, columns.astype(np.int64), True, axis=-1)
    return mask[..., :length]


_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "min_tokens",
    "logprobs",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


_FORMS = ("response_format", "structured_outputs")


def run_generate(args: argparse.Namespace) -> int:
    """Prints the completion as it comes; the finish reason and counts go to stderr."""
    values = {"max_tokens": args.max_tokens, "ignore_eos": args.ignore_eos}
    values |= {key: getattr(args, key) for key in _SAMPLING}
    defaults = GenerationConfig.from_directory(args.checkpoint).sampling
    sampling = SamplingParams.from_mapping(values, defaults)
    prompts = PromptBuilder(args.checkpoint, worker=False)
    prompt = prompts.from_text(args.prompt)
    form = take_constraint({key: getattr(args, key) for key in _FORMS})
    grammar = GrammarBuilder(prompts.tokenizer).build(form, prompt.options)
    if grammar is not None:
        sampling = replace(sampling, grammar=grammar.text, grammar_after=grammar.after)
    config = _engine_config(args, num_pages=args.pages, max_rows=args.max_rows)
    client = EngineClient.start(config, _progress)
    try:
        for _ in range(args.repeat):
            output = OutputProcessor(prompts.tokenizer, prompt.options)
            chunks = []
            for companion in _companions(args.batch_with, len(prompt.ids), args.max_tokens):
                client.submit(companion)
            for chunk in complete(client, prompt.ids, sampling):
                chunks.append(chunk)
                delta = output.push(chunk.token_ids, chunk.finish_reason)
                if not args.json:
                    print(delta.reasoning_content + delta.text, end="", flush=True)
            client.cancel_all()  # companions that are not done
    finally:
        client.close()
        prompts.close()
    if args.json:
        print(json.dumps(_summary(chunks)))
        return 0
    last = chunks[-1]
    print()
    _progress(
        f"finish_reason {last.finish_reason}, {last.num_prompt_tokens} prompt tokens"
        f" ({last.num_cached_tokens} cached), {last.num_output_tokens} output tokens"
    )
    return 0


def _summary(chunks: list[Chunk]) -> dict[str, Any]:
    """One object about a finished request; a chunk is what one pass of the model confirmed."""
    return {
        "token_ids": [token for chunk in chunks for token in chunk.token_ids],
        "logprobs": [entry.logprob for chunk in chunks for entry in chunk.logprobs] or None,
        "accepted_lengths": [len(chunk.token_ids) for chunk in chunks if chunk.token_ids],
        "cached_tokens": chunks[-1].num_cached_tokens,
        "finish_reason": chunks[-1].finish_reason,
    }


def _companions(count: int, length: int, max_tokens: int) -> list[Request]:
    """Random requests of about the prompt's size, sampled, from a fixed seed."""
    generator = np.random.default_rng(0)
    return [
        Request(
            f"companion-{i}-{secrets.token_hex(4)}",
            generator.integers(0, 256, length + i).astype(np.int32),
            SamplingParams(max_tokens=max_tokens, seed=i, ignore_eos=True),
        )
        for i in range(count)
    ]
