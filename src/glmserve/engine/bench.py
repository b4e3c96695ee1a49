# SPDX-License-Identifier: Apache-2.0
"""`glmserve bench --acceptance`: tokens that a step confirms with MTP drafts, and what it saves.

Runs a file of chat requests greedily through the offline engine, with drafts and without. Operators
are timed elsewhere (`bench/`), and a served load is the load generator's business.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from glmserve.config import EngineConfig
from glmserve.engine.client import EngineClient
from glmserve.errors import CheckpointError, EngineError, InvalidInput
from glmserve.messages import IntArray, Request
from glmserve.sampling_params import SamplingParams
from glmserve.text.chat_request import ChatRequest
from glmserve.text.prompt import PromptBuilder

PROMPTS = "held_out.jsonl"  # beside a checkpoint's weights: one chat request a line
_FIELDS = ("messages", "tools", "enable_thinking", "reasoning_effort")


@dataclass
class Run:
    """Answers in the order of the prompts, and the sizes of the steps that made them."""

    tokens: list[list[int]]
    seconds: float = 0.0
    steps: list[int] = field(default_factory=list)  # tokens that a step after the first confirmed

    @property
    def accepted_length(self) -> float:
        """Mean tokens a step, the verified one included; 0 when nothing was drafted on."""
        return sum(self.steps) / len(self.steps) if self.steps else 0.0

    def accepted_at(self, place: int) -> float:
        """Share of steps that accepted the draft at `place` (0 = the first)."""
        return sum(n > place + 1 for n in self.steps) / max(1, len(self.steps))


def read_requests(path: Path, limit: int | None = None) -> list[dict[str, Any]]:
    """The file's chat requests, at most `limit`, spread over it. Raises CheckpointError."""
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as chat requests: {error}") from error
    if limit is not None and limit < len(lines):
        lines = [lines[i * len(lines) // limit] for i in range(limit)]
    return lines


def prompts_of(checkpoint: str | Path, requests: Sequence[dict[str, Any]]) -> list[IntArray]:
    """Token ids of each request, rendered by the checkpoint's template."""
    builder = PromptBuilder(checkpoint, worker=False)
    try:
        return [
            builder.from_chat(
                ChatRequest.from_inputs(**{key: one[key] for key in _FIELDS if key in one})
            ).ids
            for one in requests
        ]
    finally:
        builder.close()


def answer_all(client: EngineClient, prompts: Sequence[IntArray], max_tokens: int) -> Run:
    """Greedy answers to all prompts at once. Raises EngineError when one ends with an error."""
    run = Run([[] for _ in prompts])
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    start = time.monotonic()
    for number, prompt in enumerate(prompts):
        client.submit(Request(f"bench-{number}", prompt, sampling))
    missing = len(prompts)
    while missing:
        for chunk in client.receive():
            if chunk.finish_reason == "error":
                raise EngineError(chunk.error)
            answer = run.tokens[int(chunk.uid.removeprefix("bench-"))]
            if answer and chunk.token_ids:  # the first token comes with the prompt, undrafted
                run.steps.append(len(chunk.token_ids))
            answer.extend(chunk.token_ids)
            missing -= chunk.finish_reason is not None
    run.seconds = time.monotonic() - start
    return run


def measure(config: EngineConfig, prompts: Sequence[IntArray], max_tokens: int) -> Run:
    """One engine from start to end."""
    client = EngineClient.start(config, lambda line: print(line, file=sys.stderr, flush=True))
    try:
        return answer_all(client, prompts, max_tokens)
    finally:
        client.close()


def run_bench(args: argparse.Namespace, config: EngineConfig) -> int:
    """Prints one JSON object: acceptance by place, mean length, and both ways' seconds."""
    if not args.acceptance:
        raise InvalidInput("--acceptance", args.acceptance, "is what there is to measure")
    if config.drafts < 1:
        raise InvalidInput("--drafts", config.drafts, "must be at least 1")
    path = Path(args.prompts) if args.prompts else Path(config.checkpoint) / PROMPTS
    prompts = prompts_of(config.checkpoint, read_requests(path, args.limit))
    drafted = measure(config, prompts, args.max_tokens)
    plain = measure(replace(config, drafts=0), prompts, args.max_tokens)
    equal = sum(a == b for a, b in zip(drafted.tokens, plain.tokens, strict=True))
    result = {
        "prompts": len(prompts),
        "tokens": sum(map(len, drafted.tokens)),
        "drafts": config.drafts,
        "mean_accepted_length": round(drafted.accepted_length, 3),
        "accepted_at": [round(drafted.accepted_at(i), 3) for i in range(config.drafts)],
        "seconds": round(drafted.seconds, 2),
        "seconds_without_drafts": round(plain.seconds, 2),
        "answers_equal_without_drafts": equal,
    }
    print(json.dumps(result, indent=2))
    return 0
