# SPDX-License-Identifier: Apache-2.0
"""Requests to tools: calls with typed arguments, results read back, refusals."""

from __future__ import annotations

from tools.tiny.conversation import Conversation, Source, Turn, converse
from tools.tiny.tasks.everyday import everyday
from tools.tiny.tasks.schemas import Tool, arguments_for, make_tool, pairs, request, result


def call_turn(source: Source, tool: Tool, with_result: bool) -> Turn:
    rng = source.rng
    count = 2 if rng.random() < 0.12 and tool.parameters else 1
    calls = [arguments_for(source, tool) for _ in range(count)]
    user = request(source, tool, calls[0])
    if count == 2:
        also = pairs(source, tool, calls[1])
        if also:
            user += f" 还有:{also}。" if source.chinese else f" And again with {also}."
        else:
            calls = calls[:1]
    work = f"{tool.description}: {tool.name}" + (" x 2" if len(calls) == 2 else "")
    results: tuple[str, ...] = ()
    answers = ""
    if with_result:
        said = [result(source) for _ in calls]
        results = tuple(text for text, _ in said)
        answers = "\n".join(answer for _, answer in said)
    return Turn(
        "calls",
        user,
        work,
        answers,
        easy=True,
        calls=tuple((tool.name, one) for one in calls),
        results=results,
        after="OK",
    )


def refusal_turn(source: Source, declared: list[Tool]) -> Turn:
    """A request for a tool that is not there."""
    while True:
        missing = make_tool(source)
        if missing.name not in {tool.name for tool in declared}:
            break
    user = request(source, missing, arguments_for(source, missing))
    if not source.held and source.rng.random() < 0.25:
        other, turn = everyday(source, False)
        if other.description not in {tool.description for tool in declared}:
            missing, user = other, turn.user
    if source.chinese:
        answer = f"抱歉,没有可以{missing.description}的工具。"
        work = f"{missing.description}: 没有"
    else:
        want = missing.description[0].lower() + missing.description[1:]
        work, answer = f"{missing.description}: none", f"Sorry, I have no tool to {want}."
    return Turn("refusal", user, work, answer, easy=True)


def make_tools(source: Source, most: int = 4) -> list[Tool]:
    tools: list[Tool] = []
    while len(tools) < source.rng.randint(1, most):
        tool = make_tool(source)
        if tool.name not in {other.name for other in tools}:
            tools.append(tool)
    return tools


def make(source: Source) -> Conversation:
    """One to three requests to one set of tools; the last may still wait for its result."""
    rng = source.rng
    tools = make_tools(source)
    turns = []
    count = rng.choice((1, 1, 2, 3))
    for number in range(count):
        wait = number == count - 1 and rng.random() < 0.5
        kind = rng.random()
        if kind < 0.15:
            turns.append(refusal_turn(source, tools))
        elif kind < 0.27 and len(tools) < 5:
            tool, turn = everyday(source, not wait)
            if tool.name not in {other.name for other in tools}:
                tools.insert(rng.randint(0, len(tools)), tool)
                turns.append(turn)
        if len(turns) <= number:
            # An everyday tool has questions of its own.
            known = [t for t in tools if t.parameters or not t.schema["properties"]]
            turns.append(call_turn(source, rng.choice(known), not wait))
    return converse(turns, rng.random() < 0.6, tools=[tool.declared for tool in tools])


def ask_once(source: Source, refuse: bool = False) -> Conversation:
    """One request with reasoning: what is scored."""
    tools = make_tools(source)
    if refuse:
        turn = refusal_turn(source, tools)
    else:
        turn = call_turn(source, source.rng.choice(tools), False)
    return converse([turn], True, tools=[tool.declared for tool in tools])


def report_once(source: Source) -> Conversation:
    """A request, its call and result; the report of the result is scored."""
    tools = make_tools(source)
    turn = call_turn(source, source.rng.choice(tools), True)
    out = converse([turn], True, tools=[tool.declared for tool in tools])
    out.task = "report"
    return out
