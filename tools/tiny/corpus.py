# SPDX-License-Identifier: Apache-2.0
"""The mixture of tasks, for training and for scoring, from a seed.

Training draws keys outside the held-out tenth only, scoring inside it only: see `is_held_out`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from tools.tiny.conversation import Conversation, Source, Turn, converse
from tools.tiny.tasks import arithmetic, calls, chat, dates, lookup, records, strings

_SINGLE = (arithmetic.make, strings.make, dates.make, records.make, chat.make)
_WEIGHTS = (34, 26, 16, 12, 12)

# Share of conversations by kind. Look-ups and calls are some five times as long as the others.
_MIXTURE = (("single", 64), ("lookup", 10), ("calls", 21), ("memory", 5))


def training(seed: int, longest: int = 3000) -> Iterator[Conversation]:
    """Endless. `longest`: characters of a look-up's context."""
    rng = random.Random(seed)
    kinds, weights = [kind for kind, _ in _MIXTURE], [weight for _, weight in _MIXTURE]
    while True:
        source = Source(rng, False, rng.random() < 0.3)
        kind = rng.choices(kinds, weights)[0]
        effort = "high" if rng.random() < 0.1 else None
        if kind == "lookup":
            conversation = lookup.make(source, rng.randint(60, longest))
        elif kind == "calls":
            conversation = calls.make(source)
        elif kind == "memory":
            conversation = chat.named(source, _turns(source, rng.choice((0, 1, 2))))
        else:
            conversation = _single(source)
        conversation.effort = effort
        yield conversation


def _turns(source: Source, count: int) -> list[Turn]:
    turns = (source.rng.choices(_SINGLE, _WEIGHTS)[0](source) for _ in range(count))
    return [_careless(source, turn) if source.rng.random() < 0.25 else turn for turn in turns]


def _careless(source: Source, turn: Turn) -> Turn:
    """The same question as people type it: lower case at the start, no mark at the end."""
    user = turn.user
    if source.rng.random() < 0.7:
        user = user[0].lower() + user[1:]
    if source.rng.random() < 0.7:
        user = re.sub("[.?!。?!]+$", "", user)
    return replace(turn, user=user)


def _single(source: Source) -> Conversation:
    rng = source.rng
    turns = _turns(source, rng.choice((1, 1, 1, 2, 3)))
    if rng.random() < 0.03:
        turns[-1] = calls.refusal_turn(source, [])
    tools = []
    if rng.random() < 0.06:  # tools that nobody needs
        tools = [tool.declared for tool in calls.make_tools(source, 2)]
    system = ""
    if rng.random() < 0.08:
        system = source.say(
            ["You are a helpful assistant.", "Answer briefly.", "You are a small model."],
            ["你是一个有用的助手。", "请简短回答。"],
        )
    return converse(turns, rng.random() < 0.75, system=system, tools=tools)


def _alone(make: Callable[[Source], Turn]) -> Callable[[Source], Conversation]:
    return lambda source: converse([make(source)], True)


# What is scored: task -> a conversation whose last message is the expected answer.
SCORED: dict[str, Callable[[Source], Conversation]] = {
    "arithmetic": _alone(arithmetic.make),
    "strings": _alone(strings.make),
    "dates": _alone(dates.make),
    "json": _alone(records.make),
    "chat": _alone(chat.make),
    "lookup": lambda source: lookup.ask_once(source, source.rng.randint(1300, 3000)),
    "memory": lambda source: chat.named(source, _turns(source, 1)),
    "calls": calls.ask_once,
    "report": calls.report_once,
    "refusal": lambda source: calls.ask_once(source, refuse=True),
}


def held_out(
    task: str,
    count: int,
    seed: int,
    accepts: Callable[[Conversation], bool] = lambda _: True,
) -> list[Conversation]:
    """`count` conversations of a task that `accepts` takes; a quarter is Chinese. The last message
    is the expected answer."""
    rng = random.Random(f"{task} {seed}")
    out: list[Conversation] = []
    while len(out) < count:
        conversation = SCORED[task](Source(rng, True, len(out) % 4 == 3))
        conversation.task = task
        if accepts(conversation):
            out.append(conversation)
    return out
