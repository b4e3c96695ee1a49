# SPDX-License-Identifier: Apache-2.0
"""Answers in JSON: fields of a described record, one object or a list of two."""

from __future__ import annotations

import json
from typing import Any

from tools.tiny import words
from tools.tiny.conversation import Source, Turn

_FIELDS = (
    ("name", "名字"),
    ("age", "年龄"),
    ("city", "城市"),
    ("colour", "颜色"),
    ("code", "代码"),
    ("price", "价格"),
    ("title", "标题"),
    ("count", "数量"),
    ("active", "启用"),
)


def _value(source: Source, field: str) -> Any:
    rng = source.rng
    if field == "name":
        return words.person(rng, source.chinese)
    if field == "city":
        return words.city(rng, source.chinese)
    if field == "colour":
        return rng.choice(words.COLOURS_ZH if source.chinese else words.COLOURS)
    if field == "title":
        return words.phrase(rng, source.chinese)
    if field == "active":
        return rng.random() < 0.5
    if field == "price":
        return words.number(rng, 2) + rng.randint(1, 9) / 10
    return words.number(rng, {"age": 2, "code": 4, "count": rng.choice((1, 2, 3))}[field])


def make(source: Source) -> Turn:
    rng = source.rng
    while True:
        fields = rng.sample(_FIELDS, rng.choice((2, 3, 3, 4)))
        records = [
            {english: _value(source, english) for english, _ in fields}
            for _ in range(2 if rng.random() < 0.2 else 1)
        ]
        value: Any = records[0] if len(records) == 1 else records
        text = json.dumps(value, ensure_ascii=False)
        if source.allows(text):
            break
    described = (";" if source.chinese else "; ").join(
        (",".join if source.chinese else ", ".join)(
            _say(source, english, chinese, record[english]) for english, chinese in fields
        )
        for record in records
    )
    user = source.say(
        [
            f"Write this as JSON: {described}.",
            f"Return JSON for: {described}",
            f"Give me a JSON {'list' if len(records) == 2 else 'object'} with {described}.",
        ],
        [f"用 JSON 表示:{described}。", f"请写成 JSON:{described}"],
    )
    keys = " ".join(english for english, _ in fields)
    return Turn("json", user, f"JSON {len(records)}: {keys}", text, easy=True)


def _say(source: Source, english: str, chinese: str, value: Any) -> str:
    if isinstance(value, bool):
        spoken = ("是" if value else "否") if source.chinese else ("yes" if value else "no")
    else:
        spoken = str(value)
    return f"{chinese}是 {spoken}" if source.chinese else f"{english} is {spoken}"
