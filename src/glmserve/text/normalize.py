# SPDX-License-Identifier: Apache-2.0
"""Messages as templates expect them, made from messages as clients send them.

Argument strings become objects, null contents empty, `developer` is a system role, `reasoning` is
reasoning_content, and tool results follow the order of their calls where the template would sort
them itself (in quadratic time). Works on copies, in time linear in the request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from glmserve.errors import InvalidInput
from glmserve.text import client_json
from glmserve.text.template import Message
from glmserve.text.template_traits import TemplateTraits

_TEXT_PARTS = ("text", "input_text", "output_text")


def normalize_messages(
    messages: Sequence[Mapping[str, Any]], traits: TemplateTraits | None = None
) -> list[Message]:
    """Fresh messages for a template. Raises InvalidInput naming the message and its field."""
    normal = [_message(message, index) for index, message in enumerate(messages)]
    if traits is not None and traits.sorts_results:
        _order_results(normal, traits)
    return normal


def _message(source: Mapping[str, Any], index: int) -> Message:
    message = {key: value for key, value in source.items() if value is not None}
    if message["role"] == "developer":
        message["role"] = "system"
    message["content"] = _content(message.get("content", ""))
    reasoning = message.pop("reasoning", None)
    if reasoning is not None:
        message.setdefault("reasoning_content", reasoning)
    if isinstance(message.get("tool_call_id"), int):
        message["tool_call_id"] = str(message["tool_call_id"])
    calls = message.pop("tool_calls", None)
    if calls:
        message["tool_calls"] = [
            _call(call, f"messages[{index}].tool_calls[{place}].function.arguments")
            for place, call in enumerate(calls)
        ]
    return message


def _content(content: Any) -> Any:
    if isinstance(content, dict):  # a tool's result that was not turned into text
        return json.dumps(content, ensure_ascii=False)
    if not isinstance(content, list):
        return content
    return [
        {**part, "type": "text"}
        if isinstance(part, dict) and part.get("type") in _TEXT_PARTS
        else {"type": "text", "text": part}
        if isinstance(part, str)
        else part
        for part in content
    ]


def _call(call: Mapping[str, Any], field: str) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = client_json.loads(field, arguments) if arguments.strip() else None
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise InvalidInput(field, arguments, "must be a JSON object")
    normal = {**call, "function": {**function, "arguments": arguments}}
    if isinstance(normal.get("id"), int):
        normal["id"] = str(normal["id"])
    return normal


def _order_results(messages: list[Message], traits: TemplateTraits) -> None:
    """Sort each run of tool results as the template would, then take its reason to sort away."""
    start = 0
    while start < len(messages):
        if messages[start]["role"] != "tool":
            start += 1
            continue
        end = start
        while end < len(messages) and messages[end]["role"] == "tool":
            end += 1
        calls = messages[start - 1].get("tool_calls", []) if start else []
        results = messages[start:end]
        ordered = _ordered(results, [call.get("id") for call in calls], traits.sorts_partial)
        if traits.ignores_order_without_ids:
            ordered = [_without(message, "tool_call_id") for message in ordered]
            if calls:
                bare = [_without(call, "id") for call in calls]
                messages[start - 1] = {**messages[start - 1], "tool_calls": bare}
        messages[start:end] = ordered
        start = end


def _ordered(results: list[Message], call_ids: list[Any], partial: bool) -> list[Message]:
    """Results in the calls' order if all ids are present, unique and known; else as sent."""
    places = {identifier: place for place, identifier in enumerate(call_ids)}
    ids = [result.get("tool_call_id") for result in results]
    usable = (
        None not in places
        and None not in ids
        and len(places) == len(call_ids)
        and len(set(ids)) == len(ids)
        and all(identifier in places for identifier in ids)
        and (partial or len(ids) == len(call_ids))
    )
    if not usable:
        return results
    return sorted(results, key=lambda result: places[result["tool_call_id"]])


def _without(mapping: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in mapping.items() if name != key}


def shield_literals(
    messages: Sequence[Message], literals: Sequence[str], opening: str, closing: str
) -> list[Message]:
    """Copies in which markers spelled by users and tools stand between `opening` and `closing`."""
    pattern = re.compile("|".join(re.escape(name) for name in sorted(literals, key=len)[::-1]))

    def shield(text: str) -> str:
        return pattern.sub(lambda match: opening + match.group() + closing, text)

    return [
        {**message, "content": _map_text(message["content"], shield)}
        if message["role"] in ("user", "tool")
        else message
        for message in messages
    ]


def _map_text(content: Any, change: Callable[[str], str]) -> Any:
    if isinstance(content, str):
        return change(content)
    if isinstance(content, list):
        return [_map_text(part, change) for part in content]
    if isinstance(content, dict):
        return {
            key: _map_text(value, change) if key in ("text", "output") else value
            for key, value in content.items()
        }
    return content
