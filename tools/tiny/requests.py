# SPDX-License-Identifier: Apache-2.0
"""Held-out conversations as chat requests with the answer that is expected, one a JSON line."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tools.tiny import corpus
from tools.tiny.conversation import Conversation
from tools.tiny.decode import fits
from tools.tiny.tokens import Encoder


def request_of(conversation: Conversation) -> dict[str, Any]:
    """What a client sends, and under `expected` what the model should say."""
    *messages, last = conversation.messages
    out: dict[str, Any] = {"task": conversation.task, "messages": messages}
    if conversation.tools:
        out["tools"] = conversation.tools
    if not conversation.thinking:
        out["enable_thinking"] = False
    calls = [call["function"] for call in last.get("tool_calls", ())]
    out["expected"] = {"content": last["content"], "tool_calls": calls}
    return out


def held_out_requests(
    checkpoint: Path,
    count: int,
    seed: int,
    tasks: Iterable[str] = tuple(corpus.SCORED),
    longest: int = 1000 - 150,
) -> list[dict[str, Any]]:
    """`count` requests of each task, with lengths that the checkpoint was trained for."""
    encoder = Encoder.of(checkpoint)
    topk = json.loads((checkpoint / "config.json").read_text("utf-8"))["index_topk"]
    return [
        request_of(conversation)
        for task in tasks
        for conversation in corpus.held_out(
            task, count, seed, lambda c: fits(c, encoder, topk, longest)
        )
    ]


def write_requests(path: Path, requests: Iterable[dict[str, Any]]) -> None:
    lines = [json.dumps(one, ensure_ascii=False) + "\n" for one in requests]
    path.write_text("".join(lines), encoding="utf-8")
