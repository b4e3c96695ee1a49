# SPDX-License-Identifier: Apache-2.0
"""Speed and memory of the output stage: token ids in, deltas out, one core, no server.

    python bench/text.py [--tokens 100000] [--runs 5] [--json FILE]

The stream is reasoning, content in two scripts and a tool call with one argument of half the
tokens. Ids come one at a time (plain decoding), in threes (drafts accepted) and, as a server with
stop strings sees it, one at a time with two stops. The best of some runs counts: the figure is
the code's, not the neighbours'. Memory is what the processor still holds at the end of a stream.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import Any

from glmserve.text.output import OutputProcessor
from glmserve.text.output_options import OutputOptions, StopOptions
from glmserve.text.synthetic_tokenizer import write_tokenizer
from glmserve.text.tokenizer import Tokenizer

TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "write_file",
            "parameters": {"properties": {"path": {"type": "string"}, "text": {"type": "string"}}},
        },
    },
)
_THOUGHT = "Let me think about the weather in the city, then write the answer. "
_ANSWER = "The result of the work is 42, 你好, and that is good.\n"
_CODE = 'def main(args):\n    print("value", 1 < 2)\n'


def stream(tokenizer: Tokenizer, tokens: int) -> list[int]:
    """About `tokens` ids: a quarter reasoning, a quarter content, half a tool argument."""

    def fill(text: str, count: int) -> list[int]:
        ids = tokenizer.encode(text).tolist()
        return (ids * (count // len(ids) + 1))[:count]

    return [
        *fill(_THOUGHT, tokens // 4),
        *tokenizer.encode("</think>").tolist(),
        *fill(_ANSWER, tokens // 4),
        *tokenizer.encode("<tool_call>write_file<arg_key>text</arg_key><arg_value>").tolist(),
        *fill(_CODE, tokens // 2),
        *tokenizer.encode("</arg_value></tool_call>").tolist(),
    ]


def push_all(tokenizer: Tokenizer, options: OutputOptions, groups: list[list[int]]) -> float:
    """Seconds that one answer takes."""
    processor = OutputProcessor(tokenizer, options)
    started = time.perf_counter()
    for group in groups:
        processor.push(group)
    delta = processor.push([], "stop")
    seconds = time.perf_counter() - started
    assert delta.finish_reason == "tool_calls"
    return seconds


def held_bytes(tokenizer: Tokenizer, options: OutputOptions, groups: list[list[int]]) -> int:
    """Memory that a processor has grown by after a stream, before its end."""
    processor = OutputProcessor(tokenizer, options)
    processor.push(groups[0])
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for group in groups[1:]:
        processor.push(group)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return after - before


def measure(tokenizer: Tokenizer, tokens: int, runs: int) -> dict[str, Any]:
    """Tokens a second of each way of feeding, and the memory that stays."""
    ids = stream(tokenizer, tokens)
    plain = OutputOptions(start="reasoning", tools=TOOLS)
    stops = OutputOptions(start="reasoning", tools=TOOLS, stop=StopOptions(("\n\nUser:", "###")))
    figures: dict[str, Any] = {"tokens": len(ids)}
    for name, options, size in (
        ("one at a time", plain, 1),
        ("in threes", plain, 3),
        ("one at a time, two stop strings", stops, 1),
    ):
        groups = [ids[start : start + size] for start in range(0, len(ids), size)]
        best = min(push_all(tokenizer, options, groups) for _ in range(runs))
        figures[name] = round(len(ids) / best)
    groups = [[token] for token in ids[:-2]]  # ends inside the argument
    figures["bytes held, whole stream"] = held_bytes(tokenizer, plain, groups)
    figures["bytes held, a tenth of it"] = held_bytes(tokenizer, plain, groups[: tokens // 10])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        write_tokenizer(directory, 1024, seed=0)
        figures = measure(Tokenizer(directory), args.tokens, args.runs)
    figures |= {"python": platform.python_version(), "machine": platform.machine()}
    for name, value in figures.items():
        print(f"{name:34} {value:>12,}" if isinstance(value, int) else f"{name:34} {value:>12}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
