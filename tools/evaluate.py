#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Scores a running server on held-out prompts: python tools/evaluate.py --checkpoint DIR.

Greedy, through the ensemble's HTTP endpoint. `--write FILE` writes the prompts instead and needs no
server; `--against FILE` compares with the answers of an earlier run (`--answers FILE`).
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.tiny import corpus
from tools.tiny.requests import held_out_requests, write_requests

Answer = dict[str, Any]


def ask(address: str, request: dict[str, Any], max_tokens: int) -> Answer:
    """One answer: content, reasoning_content, tool_calls, finish_reason, num_output_tokens."""
    body: dict[str, Any] = {
        "messages": json.dumps(request["messages"], ensure_ascii=False),
        "temperature": 0,
        "max_tokens": max_tokens,
    }
    if "tools" in request:
        body["tools"] = json.dumps(request["tools"], ensure_ascii=False)
    if "enable_thinking" in request:
        body["enable_thinking"] = request["enable_thinking"]
    connection = http.client.HTTPConnection(address, timeout=600)
    try:
        connection.request("POST", "/v2/models/ensemble/generate", json.dumps(body))
        response = connection.getresponse()
        text = response.read().decode()
    finally:
        connection.close()
    if response.status != 200:
        raise SystemExit(f"the server answered {response.status}: {text}")
    values = json.loads(text)
    if values["finish_reason"] == "error":
        raise SystemExit(f"the server failed: {values['error_message']}")
    calls = values["tool_calls"]
    values["tool_calls"] = json.loads(calls) if isinstance(calls, str) else calls
    return {
        "content": values["text_output"],
        "reasoning_content": values["reasoning_content"],
        "tool_calls": values["tool_calls"],
        "finish_reason": values["finish_reason"],
        "num_output_tokens": values["num_output_tokens"],
    }


def is_right(request: dict[str, Any], answer: Answer) -> bool:
    """Exact content; of calls, names and arguments in order; JSON by value."""
    expected = request["expected"]
    if joined_calls(answer["tool_calls"]) != expected["tool_calls"]:
        return False
    if request["task"] == "json":
        return bool(_parsed(answer["content"]) == json.loads(expected["content"]))
    return bool(answer["content"].strip() == expected["content"].strip())


def joined_calls(deltas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """OpenAI's deltas as whole calls: name and parsed arguments."""
    names: dict[int, str] = {}
    texts: dict[int, str] = {}
    for delta in deltas:
        index, function = delta["index"], delta["function"]
        names[index] = names.get(index) or function.get("name", "")
        texts[index] = texts.get(index, "") + function.get("arguments", "")
    return [{"name": name, "arguments": _parsed(texts[i])} for i, name in names.items()]


def _parsed(text: str) -> Any:
    """The JSON value, or an object that equals nothing."""
    try:
        return json.loads(text)
    except ValueError:
        return object()


def is_closed(answer: Answer) -> bool:
    """The reasoning ended, and so did the answer."""
    said = bool(answer["content"].strip() or answer["tool_calls"])
    return said and answer["finish_reason"] in ("stop", "tool_calls")


def is_json(answer: Answer) -> bool:
    return type(_parsed(answer["content"])) in (dict, list)


def summarise(
    requests: list[dict[str, Any]], answers: list[Answer], seconds: float
) -> dict[str, Any]:
    pairs = list(zip(requests, answers, strict=True))
    right = {
        task: [is_right(r, a) for r, a in pairs if r["task"] == task]
        for task in dict.fromkeys(r["task"] for r in requests)
    }
    thinking = [a for r, a in pairs if r.get("enable_thinking", True)]
    tools = {t["function"]["name"] for r in requests for t in r.get("tools", ())}
    objects = [is_json(a) for r, a in pairs if r["task"] == "json"]
    return {
        "prompts": len(requests),
        "right": {task: round(sum(ok) / len(ok), 4) for task, ok in right.items()},
        "reasoning_closed": round(sum(map(is_closed, thinking)) / max(1, len(thinking)), 4),
        "json_valid": round(sum(objects) / max(1, len(objects)), 4),
        "tools_declared": len(tools),
        "output_tokens": sum(a["num_output_tokens"] for a in answers),
        "seconds": round(seconds, 1),
    }


def compare(answers: list[Answer], earlier: list[Answer]) -> dict[str, float]:
    """How far two runs of the same prompts agree."""
    keys = ("content", "reasoning_content", "tool_calls")
    same = [
        all(_plain(a, key) == _plain(b, key) for key in keys)
        for a, b in zip(answers, earlier, strict=True)
    ]
    return {"answers_equal": round(sum(same) / len(same), 4)}


def _plain(answer: Answer, key: str) -> Any:
    if key == "tool_calls":  # ids differ from run to run
        return joined_calls(answer[key])
    return answer[key]


def main() -> None:
    args = _arguments_of_the_program()
    requests = held_out_requests(args.checkpoint, args.count, args.seed, args.tasks)
    if args.write:
        write_requests(args.write, requests)
        return
    start = time.monotonic()
    with ThreadPoolExecutor(args.parallel) as pool:
        answers = list(pool.map(lambda r: ask(args.address, r, args.max_tokens), requests))
    result = summarise(requests, answers, time.monotonic() - start)
    if args.against:
        result |= compare(answers, json.loads(args.against.read_text("utf-8")))
    if args.answers:
        args.answers.write_text(json.dumps(answers, ensure_ascii=False), encoding="utf-8")
    if args.show_wrong:
        for request, answer in zip(requests, answers, strict=True):
            if not is_right(request, answer):
                asked = request["messages"][-1]["content"][-200:]
                print(
                    json.dumps(
                        [request["task"], asked, request["expected"], answer], ensure_ascii=False
                    ),
                    file=sys.stderr,
                )
    print(json.dumps(result, indent=2))


def _arguments_of_the_program() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--address", default="127.0.0.1:8000", help="HTTP host:port")
    parser.add_argument("--count", type=int, default=100, help="prompts a task")
    parser.add_argument("--seed", type=int, default=20260)
    parser.add_argument("--tasks", nargs="+", default=list(corpus.SCORED), choices=corpus.SCORED)
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--parallel", type=int, default=16)
    parser.add_argument("--write", type=Path, help="write the prompts as JSON lines and end")
    parser.add_argument("--answers", type=Path, help="keep the answers there")
    parser.add_argument("--against", type=Path, help="answers of an earlier run")
    parser.add_argument("--show-wrong", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
