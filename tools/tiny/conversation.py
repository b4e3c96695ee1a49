# SPDX-License-Identifier: Apache-2.0
"""Conversations of the generator: what is said, what is trained, and how the text looks.

`render` writes the prompt format of the checkpoint's chat template directly, because a template
engine is too slow for hundreds of millions of tokens; a test holds the two equal. Not its job: what
the conversations are about (`tasks`), or token ids (`tokens`).
"""

from __future__ import annotations

import json
import random
import zlib
from dataclasses import dataclass, field
from typing import Any

from glmserve.text.template import Message

HELD_OUT = 10  # one key in this many is never trained on

_TOOLS_HEAD = """<|system|>
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
"""
_TOOLS_TAIL = """
</tools>

For each function call, output the function name and arguments within the following XML format:
<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value>\
<arg_key>{arg-key-2}</arg_key><arg_value>{arg-value-2}</arg_value>...</tool_call>"""


def is_held_out(key: str) -> bool:
    """Whether a task's key (operands, word, tool name ...) belongs to the held-out tenth."""
    return zlib.crc32(key.encode()) % HELD_OUT == 0


@dataclass(frozen=True)
class Source:
    """Where a task draws from: the generator, the split and the language."""

    rng: random.Random
    held: bool  # keys of the held-out tenth only; otherwise none of them
    chinese: bool

    def allows(self, key: str) -> bool:
        return is_held_out(key) == self.held

    def say(self, english: list[str], chinese: list[str]) -> str:
        return self.rng.choice(chinese if self.chinese else english)


@dataclass(frozen=True)
class Turn:
    """One question with its answer. `work` is the reasoning that leads there.

    `calls` come instead of an answer; `results` are what the tools say, then `answer` follows.
    An `easy` answer needs no reasoning: it is trained in every place.
    """

    task: str
    user: str
    work: str
    answer: str
    easy: bool = False
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    results: tuple[str, ...] = ()
    after: str = ""  # reasoning between results and answer


@dataclass
class Conversation:
    """Messages as a client sends them, the last one the assistant's, and which of them count."""

    messages: list[Message]
    trained: list[bool]  # an entry for each assistant message
    tools: list[dict[str, Any]] = field(default_factory=list)
    thinking: bool = True
    effort: str | None = None
    task: str = ""


def converse(
    turns: list[Turn],
    thinking: bool,
    system: str = "",
    tools: list[dict[str, Any]] | None = None,
    effort: str | None = None,
) -> Conversation:
    """The turns as one conversation.

    Templates drop the reasoning of earlier turns, so answers that need it are not trained there.
    Without thinking, answers that need work show it.
    """
    out = Conversation([], [], tools or [], thinking, effort, turns[-1].task)
    if system:
        out.messages.append({"role": "system", "content": system})
    for number, turn in enumerate(turns):
        last = number == len(turns) - 1
        out.messages.append({"role": "user", "content": turn.user})
        if turn.calls:
            _say(out, turn.work, "", thinking and last, True, turn.calls)
            if not turn.results:
                continue
            for result in turn.results:
                out.messages.append({"role": "tool", "content": result})
            _say(out, turn.after, turn.answer, thinking and last, True)
        elif thinking or turn.easy:
            _say(out, turn.work, turn.answer, thinking and last, last or turn.easy)
        else:
            _say(out, "", f"{turn.work}\n{turn.answer}", False, True)
    return out


def _say(
    out: Conversation,
    work: str,
    answer: str,
    keep: bool,
    trained: bool,
    calls: tuple[tuple[str, dict[str, Any]], ...] = (),
) -> None:
    message: Message = {"role": "assistant", "content": answer}
    if keep:
        message["reasoning_content"] = work
    if calls:
        message["tool_calls"] = [
            {"type": "function", "function": {"name": name, "arguments": arguments}}
            for name, arguments in calls
        ]
    out.messages.append(message)
    out.trained.append(trained)


def render(conversation: Conversation, messages: list[Message], prompt: bool) -> str:
    """The text of `messages`; with `prompt` it ends where the assistant goes on."""
    c = conversation
    parts = ["[gMASK]<sop>"]
    if c.thinking:
        parts.append(f"<|system|>Reasoning Effort: {'High' if c.effort == 'high' else 'Max'}")
    if c.tools:
        parts.append(_TOOLS_HEAD)
        parts.append("\n".join(_json(tool["function"]) for tool in c.tools))
        parts.append(_TOOLS_TAIL)
    for i, message in enumerate(messages):
        role, content = message["role"], message["content"]
        if role == "tool":
            if messages[i - 1]["role"] != "tool":
                parts.append("<|observation|>")
            parts.append(f"<tool_response>{content}</tool_response>")
        elif role == "assistant":
            work = message.get("reasoning_content", "")
            parts.append(f"<|assistant|><think>{work}</think>{content.strip()}")
            for call in message.get("tool_calls", ()):
                parts.append(_call(call["function"]))
        else:
            parts.append(f"<|{role}|>{content}")
    if prompt:
        parts.append("<|assistant|><think>" + ("" if c.thinking else "</think>"))
    return "".join(parts)


def full_text(conversation: Conversation) -> str:
    """The training text: everything and the marker that ends the last turn."""
    calls = conversation.messages[-1].get("tool_calls")
    end = "<|observation|>" if calls else "<|user|>"
    return render(conversation, conversation.messages, False) + end


def _call(function: dict[str, Any]) -> str:
    pairs = "".join(
        f"<arg_key>{key}</arg_key><arg_value>"
        f"{value if isinstance(value, str) else _json(value)}</arg_value>"
        for key, value in function["arguments"].items()
    )
    return f"<tool_call>{function['name']}{pairs}</tool_call>"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
