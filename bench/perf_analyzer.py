# SPDX-License-Identifier: Apache-2.0
"""Inputs for perf_analyzer (the load generator of Triton's maintainers) and what its export says.

`inputs` writes a file for `--input-data`, `report` reads the one of `--profile-export-file`.
perf_analyzer's own summary takes a stream's first response for the request's latency and a response
for a token; here a response without tokens (a stream's sign of life) is none, a response of several
tokens counts as several, and thinking is told apart from the answer.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from glmserve.text.tokenizer import Tokenizer

WORDS = 4096  # different words that prompts are made of, at most
PERCENTILES = (50, 90, 99)


def words(tokenizer: Tokenizer) -> list[str]:
    """Words with a blank before them that are one token each, also one after another."""

    def single() -> Any:
        for token in range(tokenizer.vocab_size):
            text = tokenizer.decode([token])
            if re.fullmatch(" [A-Za-z]{2,}", text) and len(tokenizer.encode(text * 2)) == 2:
                yield text

    found = list(islice(single(), WORDS))
    if len(found) < 2:
        raise SystemExit("the tokenizer has no words of one token to make prompts of")
    return found


def random_prompts(
    tokenizer: Tokenizer, count: int, tokens: int, shared: int, seed: int
) -> list[str]:
    """`count` prompts of `tokens` tokens each; their first `shared` tokens are the same."""
    draw, choices = random.Random(seed), words(tokenizer)
    start = draw.choices(choices, k=shared)
    prompts = ["".join(start + draw.choices(choices, k=tokens - shared)) for _ in range(count)]
    wrong = {len(tokenizer.encode(prompt)) for prompt in prompts} - {tokens}
    assert not wrong, f"prompts of {sorted(wrong)} tokens where {tokens} were asked for"
    return prompts


def inputs(options: argparse.Namespace) -> None:
    """Prints perf_analyzer's JSON: random words of exact length, or the chats of a file."""
    common: dict[str, list[object]] = {"stream": [True], "max_tokens": [options.output_tokens]}
    if options.chats:
        lines = options.chats.read_text("utf-8").splitlines()
        bodies: list[dict[str, list[object]]] = [
            {"messages": [json.dumps(json.loads(line)["messages"], ensure_ascii=False)]}
            for line in lines
            if line.strip()
        ]
    else:
        if options.checkpoint is None:
            raise SystemExit("--checkpoint (its tokenizer makes the prompts) or --chats is needed")
        if not 0 <= options.shared_tokens < options.input_tokens:
            raise SystemExit(
                f"--shared-tokens {options.shared_tokens}: must be in"
                f" [0, --input-tokens = {options.input_tokens})"
            )
        prompts = random_prompts(
            Tokenizer(options.checkpoint),
            options.requests,
            options.input_tokens,
            options.shared_tokens,
            options.seed,
        )
        bodies = [{"text_input": [prompt], "ignore_eos": [True]} for prompt in prompts]
    json.dump({"data": [{**body, **common} for body in bodies]}, sys.stdout, ensure_ascii=False)
    print()


@dataclass
class Stream:
    """One request of the export; times in ms after its start."""

    input_tokens: int
    output_tokens: int
    first_token: float
    first_answer: float | None  # text or a tool call, after the thinking
    end: float
    between: float | None  # mean time of a token after the first response's
    error: str

    @classmethod
    def read(cls, record: dict[str, Any]) -> Stream:
        """Of one element of `requests`; a stream without tokens counts as failed."""
        first = answer = last = None
        opening = tokens = prompt = 0
        error = ""
        for stamp, response in zip(
            record["response_timestamps"], record["response_outputs"], strict=True
        ):
            count = int(response.get("num_output_tokens", 0))
            now = (stamp - record["timestamp"]) / 1e6
            prompt = int(response.get("num_input_tokens", prompt))
            error = error or response.get("error_message", "")
            if answer is None and (
                response.get("text_output") or response.get("tool_calls", "[]") != "[]"
            ):
                answer = now
            if not count:
                continue
            if first is None:
                first, opening = now, count
            last, tokens = now, tokens + count
        if first is None or last is None:
            return cls(prompt, 0, 0.0, None, 0.0, None, error or "no token came")
        between = (last - first) / (tokens - opening) if tokens > opening else None
        return cls(prompt, tokens, first, answer, last, between, error)


def percentiles(values: list[float]) -> list[float]:
    return [round(float(v), 2) for v in np.percentile(values, PERCENTILES)] if values else []


def summary(experiment: dict[str, Any], first_ms: float, between_ms: float) -> dict[str, Any]:
    """What one load of the export says: rates per second, percentiles in ms.

    With a bound, `good_requests_per_s` counts requests whose first token came within `first_ms`
    and whose tokens within `between_ms` of each other on average.
    """
    records = experiment["requests"]
    streams = [Stream.read(record) for record in records]
    whole = [s for s in streams if not s.error]
    begin = min(r["timestamp"] for r in records)
    end = max(max(r["response_timestamps"], default=r["timestamp"]) for r in records)
    seconds = max(end - begin, 1) / 1e9
    good = [s for s in whole if s.first_token <= first_ms and (s.between or 0.0) <= between_ms]
    bounded = min(first_ms, between_ms) < float("inf")
    tokens = sum(s.output_tokens for s in whole)
    return {
        "load": "{mode} {value}".format(**experiment["experiment"]),
        "requests": len(streams),
        "failed": len(streams) - len(whole),
        "errors": sorted({s.error for s in streams if s.error}),
        "seconds": round(seconds, 3),
        "input_tokens": sum(s.input_tokens for s in whole),
        "output_tokens": tokens,
        "requests_per_s": round(len(whole) / seconds, 3),
        **({"good_requests_per_s": round(len(good) / seconds, 3)} if bounded else {}),
        "output_tokens_per_s": round(tokens / seconds, 2),
        "time_to_first_token_ms": percentiles([s.first_token for s in whole]),
        "time_to_answer_ms": percentiles(
            [s.first_answer for s in whole if s.first_answer is not None]
        ),
        "inter_token_ms": percentiles([s.between for s in whole if s.between is not None]),
        "request_ms": percentiles([s.end for s in whole]),
    }


def report(options: argparse.Namespace) -> int:
    """Prints a block for each load of the export; 1 if a request failed or there is none."""
    try:
        export = json.loads(options.profile.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise SystemExit(f"{options.profile} cannot be read: {error}") from error
    loads = [e for e in export["experiments"] if e["requests"]]
    if not loads:
        raise SystemExit(f"{options.profile} has no requests")
    results = [summary(e, options.first_ms, options.between_ms) for e in loads]
    if options.json:
        print(json.dumps(results, indent=1))
    else:
        for result in results:
            print(f"{result.pop('load')} (three figures: p50, p90, p99)")
            for name, value in result.items():
                if value == []:
                    continue
                shown = " / ".join(map(str, value)) if isinstance(value, list) else value
                print(f"  {name:24} {shown}")
    return int(any(result["failed"] for result in results))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    made = commands.add_parser("inputs", help="print a file for --input-data")
    made.add_argument("--checkpoint", type=Path, help="random words of its tokenizer")
    made.add_argument("--requests", type=int, default=64, help="prompts to make (default 64)")
    made.add_argument("--input-tokens", type=int, default=1024, help="of a prompt (default 1024)")
    made.add_argument("--shared-tokens", type=int, default=0, help="that all prompts start with")
    made.add_argument("--output-tokens", type=int, default=128, help="of an answer (default 128)")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--chats", type=Path, help='JSON lines with "messages" in place of words')
    made.set_defaults(run=inputs)
    read = commands.add_parser("report", help="print what an export says")
    read.add_argument("profile", type=Path)
    read.add_argument("--first-ms", type=float, default=float("inf"), help="bound of good requests")
    read.add_argument("--between-ms", type=float, default=float("inf"), help="the same, a token")
    read.add_argument("--json", action="store_true")
    read.set_defaults(run=report)
    options = parser.parse_args()
    return int(options.run(options) or 0)


if __name__ == "__main__":
    sys.exit(main())
