# SPDX-License-Identifier: Apache-2.0
"""Tools with random schemas, values for their parameters, and how people speak of both.

A schema is a verb, a noun and parameters drawn from lists large enough that a held-out one was
never seen; the split goes by the tool's name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tools.tiny import words
from tools.tiny.conversation import Source
from tools.tiny.words import listed

_VERBS = listed(
    "get find create delete update send book open close start stop check list add remove move "
    "search cancel print share rename count read write play lock"
)
_VERBS_ZH = listed(
    "查询 查找 创建 删除 更新 发送 预订 打开 关闭 启动 停止 检查 列出 添加 移除 移动 搜索 取消 打印"
)
_NOUNS = sorted(set(words.THINGS))
# name, Chinese name, type
_PARAMETERS = (
    ("title", "标题", "phrase"),
    ("name", "名字", "person"),
    ("city", "城市", "city"),
    ("user", "用户", "person"),
    ("label", "标签", "word"),
    ("code", "代码", "code"),
    ("colour", "颜色", "colour"),
    ("note", "备注", "phrase"),
    ("target", "目标", "word"),
    ("count", "数量", "integer"),
    ("days", "天数", "integer"),
    ("level", "级别", "integer"),
    ("size", "大小", "integer"),
    ("limit", "上限", "integer"),
    ("price", "价格", "number"),
    ("weight", "重量", "number"),
    ("urgent", "紧急", "boolean"),
    ("public", "公开", "boolean"),
    ("mode", "模式", "enum"),
    ("unit", "单位", "enum"),
    ("tags", "标签列表", "array"),
)
_TYPES = {"integer": "integer", "number": "number", "boolean": "boolean", "array": "array"}


@dataclass(frozen=True)
class Tool:
    name: str
    description: str
    schema: dict[str, Any]
    parameters: tuple[tuple[str, str, str, tuple[str, ...]], ...]  # key, spoken, kind, choices

    @property
    def declared(self) -> dict[str, Any]:
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": self.schema,
            },
        }


def make_tool(source: Source) -> Tool:
    rng = source.rng
    while True:
        v, noun = rng.randrange(len(_VERBS)), rng.choice(_NOUNS)
        if rng.random() < 0.3:
            noun = words.word(rng, 2)
        name = f"{_VERBS[v]}_{noun}"
        if source.allows(f"tool {name}"):
            break
    if source.chinese and v < len(_VERBS_ZH):
        description = f"{_VERBS_ZH[v]} {noun}"
    else:
        description = f"{_VERBS[v].capitalize()} {rng.choice(('a', 'the'))} {noun}"
    picked = rng.sample(_PARAMETERS, rng.choice((0, 1, 1, 2, 2, 3, 3, 4)))
    parameters, properties = [], {}
    for english, chinese, kind in picked:
        key, spoken = english, chinese if source.chinese else english
        if rng.random() < 0.3:
            prefix = rng.choice(("new", "old", "first", "last", "max", "min", "user", noun))
            key, spoken = f"{prefix}_{english}", f"{prefix} {spoken}"
        choices: tuple[str, ...] = ()
        prop: dict[str, Any] = {"type": _TYPES.get(kind, "string")}
        if kind == "enum":
            choices = tuple(words.word(rng) for _ in range(rng.choice((2, 3))))
            prop["enum"] = list(choices)
        elif kind == "array":
            prop["items"] = {"type": "string"}
        if rng.random() < 0.25:
            prop["description"] = f"{spoken} of the {noun}"
        if key in properties:
            continue
        properties[key] = prop
        parameters.append((key, spoken, kind, choices))
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    required = [key for key in properties if rng.random() < 0.6]
    if required:
        schema["required"] = required
    return Tool(name, description, schema, tuple(parameters))


def _value(source: Source, kind: str, choices: tuple[str, ...]) -> Any:
    rng, chinese = source.rng, source.chinese
    if kind == "integer":
        return words.number(rng, rng.choice((1, 1, 2, 3)))
    if kind == "number":
        return words.number(rng, rng.choice((1, 2))) + rng.randint(1, 9) / 10
    if kind == "boolean":
        return rng.random() < 0.5
    if kind == "enum":
        return rng.choice(choices)
    if kind == "array":
        return [words.word(rng) for _ in range(rng.choice((1, 2, 3)))]
    if kind == "phrase":
        return words.phrase(rng, chinese)
    if kind == "person":
        return words.person(rng, chinese)
    if kind == "city":
        return words.city(rng, chinese)
    if kind == "colour":
        return rng.choice(words.COLOURS_ZH if chinese else words.COLOURS)
    if kind == "code":
        return rng.choice("ABCDEFGHKLMN") + str(words.number(rng, 3))
    return words.word(rng)


def _spoken(source: Source, value: Any) -> str:
    if isinstance(value, bool):
        return ("是" if value else "否") if source.chinese else ("yes" if value else "no")
    if isinstance(value, list):
        return ("、" if source.chinese else " and ").join(value)
    return str(value)


def arguments_for(source: Source, tool: Tool) -> dict[str, Any]:
    required = tool.schema.get("required", ())
    return {
        key: _value(source, kind, choices)
        for key, _, kind, choices in tool.parameters
        if key in required or source.rng.random() < 0.7
    }


def pairs(source: Source, tool: Tool, arguments: dict[str, Any]) -> str:
    spoken = {key: name for key, name, _, _ in tool.parameters}
    rng = source.rng
    join = (
        rng.choice(("为", ":", "是 ")) if source.chinese else rng.choice((" ", ": ", " is ", " = "))
    )
    items = [f"{spoken[key]}{join}{_spoken(source, value)}" for key, value in arguments.items()]
    return (",".join(items)) if source.chinese else ", ".join(items)


def request(source: Source, tool: Tool, arguments: dict[str, Any]) -> str:
    rng = source.rng
    want = (
        tool.description
        if source.chinese or rng.random() < 0.5
        else (tool.description[0].lower() + tool.description[1:])
    )
    spoken = pairs(source, tool, arguments)
    if source.chinese:
        head = rng.choice(("请{w}", "{w}", "帮我{w}", "我想{w}")).format(w=want)
        return f"{head},{spoken}。" if spoken else f"{head}。"
    head = rng.choice(("Please {w}", "{w}", "Can you {w}", "I want to {w}", "{w} for me"))
    tail = (
        rng.choice((" with {p}.", ": {p}.", ", {p}", " ({p})")).format(p=spoken) if spoken else "."
    )
    return head.format(w=want) + tail


def result(source: Source) -> tuple[str, str]:
    """What a tool says, and the answer that reports it."""
    rng = source.rng
    fields: dict[str, Any] = {}
    for _ in range(rng.choice((1, 2, 2, 3))):
        key, _, kind = rng.choice(_PARAMETERS[:16])
        fields[key] = _value(source, kind, ())
    if rng.random() < 0.4:
        fields = {"status": rng.choice(("ok", "done", "failed")), **fields}
    if source.chinese:
        return json.dumps(fields, ensure_ascii=False), "结果:" + ",".join(
            f"{key} 是 {value}" for key, value in fields.items()
        ) + "。"
    answer = ", ".join(f"{key} is {value}" for key, value in fields.items())
    return json.dumps(fields, ensure_ascii=False), f"Result: {answer}."
