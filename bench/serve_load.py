# SPDX-License-Identifier: Apache-2.0
"""The real server under streams: answers equal their own lonely runs; times to and between tokens.

Starts `glmserve serve` (options after `--` go to it), runs each of the requests alone, then many
clients at once that repeat them, some leaving early. Requests are greedy, sampled, with a stop
string, or bound to a grammar. Writes what was seen as JSON and fails when an answer differs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
REQUESTS = 32
TOKENS = 96
LEAVING = 0.1  # of the requests under load: the client closes its connection
KINDS = ("greedy", "sampled", "stop", "grammar")


@dataclass
class Answer:
    text: str = ""
    finish_reason: str = ""
    tokens: int = 0
    error: str = ""
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # when, how many tokens
    started: float = 0.0

    @property
    def key(self) -> tuple[str, str, int, str]:
        return self.text, self.finish_reason, self.tokens, self.error


async def ask(port: int, body: dict[str, Any], leave_after: int = 0) -> Answer:
    """One generate_stream request over a connection of its own."""
    answer = Answer(started=time.perf_counter())
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps({**body, "stream": True}).encode()
    head = (
        "POST /v2/models/ensemble/generate_stream HTTP/1.1\r\nHost: x\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    writer.write(head.encode() + data)
    try:
        async with asyncio.timeout(120.0):
            await reader.readuntil(b"\r\n\r\n")
            while line := await reader.readline():
                if not line.startswith(b"data:"):
                    if line.strip() == b"0":  # the last chunk
                        break
                    continue
                event = json.loads(line[5:])
                if "error" in event:
                    answer.error = str(event["error"])
                    continue
                count = int(event["num_output_tokens"])
                if count:
                    answer.arrivals.append((time.perf_counter(), count))
                answer.tokens += count
                answer.text += event["text_output"]
                answer.finish_reason = event["finish_reason"] or answer.finish_reason
                answer.error = event.get("error_message") or answer.error
                if leave_after and len(answer.arrivals) >= leave_after:
                    break
    finally:
        writer.close()
    return answer


def request(number: int) -> dict[str, Any]:
    prompt = f"{'On the road again ' * (8 * (number % 5))}question {number}:"
    body: dict[str, Any] = {"text_input": prompt, "max_tokens": TOKENS, "seed": number}
    kind = KINDS[number % len(KINDS)]
    body["temperature"] = 0.0 if kind == "greedy" else 0.9
    settings: dict[str, Any] = {"ignore_eos": True}
    if number % 8 == 5:
        settings |= {"top_p": 0.9, "top_k": 50, "repetition_penalty": 1.1}
    if kind == "grammar":
        settings = {"guided_regex": "[a-f]{3,12}( [0-9]{2,6}){1,4}"}
    return {**body, "sampling_parameters": json.dumps(settings)}


async def alone(port: int) -> list[tuple[dict[str, Any], Answer]]:
    """Every request by itself; stop strings are taken from the answer without them."""
    found = []
    for number in range(REQUESTS):
        body = request(number)
        answer = await ask(port, body)
        assert not answer.error, (body, answer.error)
        if KINDS[number % len(KINDS)] == "stop" and len(answer.text) > 20:
            middle = len(answer.text) // 2
            stop = answer.text[middle : middle + 4]
            body["stop_words"] = [stop]
            cut = await ask(port, body)
            assert cut.text == answer.text[: answer.text.index(stop)], (stop, cut.text)
            assert cut.finish_reason == "stop", cut
            answer = cut
        if KINDS[number % len(KINDS)] == "grammar":
            assert re.fullmatch("[a-f]{3,12}( [0-9]{2,6}){1,4}", answer.text), answer.text
        found.append((body, answer))
    return found


async def load(
    port: int, known: list[tuple[dict[str, Any], Answer]], streams: int, seconds: float
) -> tuple[Counter[str], list[Any], list[Answer]]:
    """`streams` clients for `seconds`: how often what, wrong answers, whole answers."""
    seen: Counter[str] = Counter()
    wrong: list[Any] = []
    whole: list[Answer] = []
    deadline = time.monotonic() + seconds

    async def client(number: int) -> None:
        draw = random.Random(number)
        while time.monotonic() < deadline:
            which = draw.randrange(len(known))
            body, want = known[which]
            if draw.random() < LEAVING:
                got = await ask(port, body, leave_after=draw.randint(1, 3))
                seen["left"] += 1
                if not want.text.startswith(got.text):
                    wrong.append((which, want.key, got.key))
                continue
            got = await ask(port, body)
            seen["whole " + KINDS[which % len(KINDS)]] += 1
            if got.key != want.key:
                wrong.append((which, want.key, got.key))
            whole.append(got)

    await asyncio.gather(*(client(i) for i in range(streams)))
    return seen, wrong, whole


def percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        f"p{p}": round(1000 * ordered[min(len(ordered) - 1, len(ordered) * p // 100)], 2)
        for p in (50, 90, 99)
    }


def times(answers: list[Answer]) -> dict[str, Any]:
    """Milliseconds to the first token and between tokens (a response's tokens share its time)."""
    first = [a.arrivals[0][0] - a.started for a in answers if a.arrivals]
    between = [
        (a.arrivals[-1][0] - a.arrivals[0][0]) / (a.tokens - a.arrivals[0][1])
        for a in answers
        if len(a.arrivals) > 1 and a.tokens > a.arrivals[0][1]
    ]
    return {
        "requests": len(answers),
        "tokens": sum(a.tokens for a in answers),
        "time_to_first_token_ms": percentiles(first),
        "inter_token_ms": percentiles(between),
    }


def start(options: list[str]) -> tuple[subprocess.Popen[str], int]:
    """The server and its HTTP port, once it is ready."""
    command = [sys.executable, "-m", "glmserve.cli", "serve", *options]
    for name in ("http", "grpc", "metrics"):
        command += [f"--{name}-port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    for line in server.stdout:
        print(line, end="", flush=True)
        if ready := re.match(r"ready: http [\d.]+:(\d+)", line):
            return server, int(ready.group(1))
    raise SystemExit(f"the server ended with {server.wait()}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--output", type=Path, default=ROOT / "bench" / "results" / "serve.json")
    parser.add_argument("options", nargs="*", help="of `glmserve serve`, after --")
    arguments = parser.parse_args()
    started = time.monotonic()
    server, port = start(arguments.options)
    ready = time.monotonic() - started
    try:
        known = asyncio.run(alone(port))
        began = time.monotonic()
        seen, wrong, whole = asyncio.run(load(port, known, arguments.streams, arguments.seconds))
        lasted = time.monotonic() - began
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)
    written = {
        "date": time.strftime("%Y-%m-%d"),
        "options": arguments.options,
        "processors": os.cpu_count(),
        "streams": arguments.streams,
        "seconds": round(lasted, 1),
        "ready_after_s": round(ready, 1),
        "exit_status": server.returncode,
        "seen": dict(seen),
        "wrong": len(wrong),
        "tokens_per_second": round(sum(a.tokens for a in whole) / lasted),
        "alone": times([answer for _, answer in known]),
        "load": times(whole),
    }
    arguments.output.write_text(json.dumps(written, indent=1) + "\n")
    print(json.dumps(written))
    for which, want, got in wrong[:10]:
        print("WRONG", which, want, got)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
