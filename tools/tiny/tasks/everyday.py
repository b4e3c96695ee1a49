# SPDX-License-Identifier: Apache-2.0
"""Tools as people know them, with questions that name no parameter. Trained, not scored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tools.tiny import words
from tools.tiny.conversation import Source, Turn
from tools.tiny.tasks.schemas import Tool, result

_STRING, _INTEGER = {"type": "string"}, {"type": "integer"}
# names, description, properties, required
_EVERYDAY: dict[str, tuple[tuple[str, ...], str, dict[str, Any], list[str]]] = {
    "weather": (
        ("get_weather", "weather", "get_current_weather", "weather_forecast"),
        "Get the weather for a city",
        {"city": _STRING, "days": _INTEGER},
        ["city"],
    ),
    "convert": (
        ("convert_currency", "exchange"),
        "Convert money",
        {"amount": {"type": "number"}, "source": _STRING, "target": _STRING},
        ["amount", "source", "target"],
    ),
    "message": (
        ("send_message", "send_text", "notify"),
        "Send a message",
        {"to": _STRING, "text": _STRING},
        ["to", "text"],
    ),
    "alarm": (("set_alarm", "set_timer"), "Set an alarm", {"minutes": _INTEGER}, ["minutes"]),
    "search": (
        ("search", "web_search", "search_web"),
        "Search the web",
        {"query": _STRING},
        ["query"],
    ),
    "time": (("get_time", "current_time"), "Get the time in a city", {"city": _STRING}, ["city"]),
}


def _everyday(source: Source) -> tuple[Tool, Callable[[], tuple[str, dict[str, Any]]]]:
    """A tool as people know them, with questions that do not name its parameters."""
    rng = source.rng
    kind = rng.choice(("weather", "convert", "message", "alarm", "search", "time"))
    names, description, properties, required = _EVERYDAY[kind]
    schema = {"type": "object", "properties": properties, "required": required}
    tool = Tool(rng.choice(names), description, schema, ())

    def ask() -> tuple[str, dict[str, Any]]:
        place, n = words.city(rng, source.chinese), words.number(rng, rng.choice((1, 2)))
        who, what = words.person(rng, source.chinese), words.phrase(rng, source.chinese)
        if kind == "weather" and rng.random() < 0.5:
            user = source.say(
                [
                    f"What is the weather in {place} for the next {n} days?",
                    f"Weather in {place}, {n} days",
                ],
                [f"{place}未来 {n} 天的天气怎么样?"],
            )
            return user, {"city": place, "days": n}
        if kind == "weather":
            user = source.say(
                [
                    f"What is the weather in {place}?",
                    f"How is the weather in {place} today?",
                    f"Will it rain in {place}?",
                ],
                [f"{place}的天气怎么样?", f"今天{place}天气好吗?"],
            )
            return user, {"city": place}
        if kind == "convert":
            one, two = rng.sample(("USD", "EUR", "CNY", "JPY", "GBP"), 2)
            user = source.say(
                [f"Convert {n} {one} to {two}.", f"How much is {n} {one} in {two}?"],
                [f"{n} {one} 等于多少 {two}?"],
            )
            return user, {"amount": n, "source": one, "target": two}
        if kind == "message":
            user = source.say(
                [f"Tell {who}: {what}", f"Send {who} the message {what}"],
                [f"告诉{who}:{what}"],
            )
            return user, {"to": who, "text": what}
        if kind == "alarm":
            user = source.say(
                [f"Wake me in {n} minutes.", f"Set an alarm in {n} minutes"],
                [f"{n} 分钟后叫我。"],
            )
            return user, {"minutes": n}
        if kind == "search":
            user = source.say(
                [f"Search for {what}", f"Find pages about {what}", f"Look up {what}"],
                [f"搜索{what}", f"查一下{what}"],
            )
            return user, {"query": what}
        user = source.say(
            [f"What time is it in {place}?", f"Time in {place}?"], [f"{place}现在几点?"]
        )
        return user, {"city": place}

    return tool, ask


def everyday(source: Source, with_result: bool) -> tuple[Tool, Turn]:
    tool, ask = _everyday(source)
    user, arguments = ask()
    said, answer = result(source)
    turn = Turn(
        "calls",
        user,
        f"{tool.description}: {tool.name}",
        answer if with_result else "",
        easy=True,
        calls=((tool.name, arguments),),
        results=(said,) if with_result else (),
        after="OK",
    )
    return tool, turn
