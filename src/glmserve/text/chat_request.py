# SPDX-License-Identifier: Apache-2.0
"""A chat request as clients send it: JSON inputs checked, with errors that name the field.

Checks shapes and sizes only; `normalize` turns the messages into what templates expect. Tools and
contents stay the client's own objects, because the order of their keys becomes tokens.
"""

from __future__ import annotations

import inspect
import re
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr, ValidationError
from pydantic_core import ErrorDetails

from glmserve.errors import InvalidInput
from glmserve.text import client_json

MAX_JSON_CHARACTERS = 64 * 2**20  # of one JSON input
MAX_MESSAGES = 16384
MAX_TOOL_CALLS = 4096  # in one message
MAX_PARTS = 4096  # in one content list
MAX_TOOLS = 128
TOOL_NAME = r"^[A-Za-z0-9_.:/-]{1,128}$"
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt")


class _Shape(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


class _CalledFunction(_Shape):
    name: Annotated[StrictStr, Field(min_length=1)]
    arguments: StrictStr | dict[str, Any] | None = None


class _ToolCall(_Shape):
    id: StrictStr | int | None = None
    function: _CalledFunction


class _Part(_Shape):
    type: StrictStr | None = None
    text: StrictStr | None = None


_Content = (
    StrictStr | Annotated[list[StrictStr | _Part], Field(max_length=MAX_PARTS)] | dict[str, Any]
)


class _Message(_Shape):
    role: Annotated[StrictStr, Field(min_length=1)]
    content: _Content | None = None
    reasoning_content: StrictStr | None = None
    reasoning: StrictStr | None = None
    tool_calls: Annotated[list[_ToolCall], Field(max_length=MAX_TOOL_CALLS)] | None = None
    tool_call_id: StrictStr | int | None = None


class _Function(_Shape):
    name: Annotated[StrictStr, Field(pattern=TOOL_NAME)]
    description: StrictStr | None = None
    parameters: dict[str, Any] | None = None


class _Tool(_Shape):
    type: Literal["function"] = "function"
    function: _Function


class _Thinking(_Shape):
    type: Literal["enabled", "disabled"] | None = None
    clear_thinking: StrictBool | None = None


class _Inputs(BaseModel):
    """Every JSON input at once; only the shape counts, the values are taken from the input."""

    model_config = ConfigDict(strict=True)

    messages: Annotated[list[_Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    tools: Annotated[list[_Tool], Field(max_length=MAX_TOOLS)] | None = None
    parallel_tool_calls: StrictBool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    thinking: _Thinking | None = None
    enable_thinking: StrictBool | None = None
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool | None = None


class ChatRequest(BaseModel):
    """A checked request. `tool_choice`: auto, none, required or "named:NAME"."""

    model_config = ConfigDict(frozen=True)

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str = "auto"
    callable_tools: frozenset[str] | None = None  # names that tool_choice allows, None for all
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    reasoning_effort: str | None = None
    thinking: dict[str, Any] = Field(default_factory=dict)
    enable_thinking: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @classmethod
    def from_inputs(
        cls,
        *,
        messages: Any,
        tools: Any = None,
        tool_choice: Any = None,
        parallel_tool_calls: bool | None = None,
        chat_template_kwargs: Any = None,
        reasoning_effort: str | None = None,
        thinking: Any = None,
        enable_thinking: bool | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
    ) -> Self:
        """Check the inputs; each JSON one may be JSON text or the value. Raises InvalidInput."""
        values = {
            "messages": _value("messages", messages),
            "tools": [_wrapped(tool) for tool in _list("tools", tools)] or None,
            "parallel_tool_calls": parallel_tool_calls,
            "chat_template_kwargs": _value("chat_template_kwargs", chat_template_kwargs),
            "reasoning_effort": reasoning_effort or None,
            "thinking": _value("thinking", thinking),
            "enable_thinking": enable_thinking,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        try:
            _Inputs.model_validate(values)
        except ValidationError as error:
            raise _first_error(error) from None
        for name in values["chat_template_kwargs"] or ():
            if name in _RESERVED:
                raise InvalidInput("chat_template_kwargs", name, "this name is an input of its own")
        choice, allowed = _tool_choice(_choice_value(tool_choice), values["tools"])
        return cls.model_construct(
            tool_choice=choice,
            callable_tools=allowed,
            **{name: value for name, value in values.items() if value is not None},
        )


# The names of a chat request's inputs, `messages` first.
CHAT_INPUTS: Final = tuple(inspect.signature(ChatRequest.from_inputs).parameters)


def _value(field: str, source: Any) -> Any:
    """The value of a JSON input; an empty one counts as absent."""
    if isinstance(source, bytes):
        try:
            source = source.decode()
        except UnicodeDecodeError:
            raise InvalidInput(field, source, "not UTF-8") from None
    if not isinstance(source, str):
        client_json.check_depth(field, source)
        return source
    if not source.strip():
        return None
    if len(source) > MAX_JSON_CHARACTERS:
        raise InvalidInput(field, len(source), f"longer than {MAX_JSON_CHARACTERS} characters")
    return client_json.loads(field, source)


def _list(field: str, source: Any) -> list[Any]:
    value = _value(field, source)
    if value is not None and not isinstance(value, list):
        raise InvalidInput(field, value, "must be a list")
    return value or []


def _wrapped(tool: Any) -> Any:
    """Bare functions are accepted where `{"type": "function", "function": ...}` is meant."""
    if isinstance(tool, dict) and "function" not in tool and "name" in tool:
        return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
    return tool


def _choice_value(source: Any) -> Any:
    """tool_choice may be a bare word or JSON."""
    if isinstance(source, bytes):
        source = source.decode(errors="replace")
    if isinstance(source, str) and re.fullmatch(r"\s*[a-z]*\s*", source):
        return source.strip() or None
    return _value("tool_choice", source)


def _tool_choice(choice: Any, tools: Any) -> tuple[str, frozenset[str] | None]:
    """The parser's word for tool_choice, and the names that it allows."""
    names = [tool["function"]["name"] for tool in tools or ()]
    if choice in (None, "auto", "none"):
        return choice or "auto", None
    if choice != "required" and not isinstance(choice, dict):
        raise InvalidInput("tool_choice", choice, "must be auto, none, required or an object")
    if not names:
        raise InvalidInput("tool_choice", choice, "needs `tools`")
    if choice == "required":
        return "required", None
    kind = choice.get("type", "function")
    if kind == "function":
        function = choice.get("function", choice)
        name = function.get("name") if isinstance(function, dict) else None
        _check_declared(name, names, choice)
        return f"named:{name}", frozenset((str(name),))
    if kind == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        mode = allowed.get("mode", "auto") if isinstance(allowed, dict) else None
        entries = allowed.get("tools") if isinstance(allowed, dict) else None
        if mode not in ("auto", "required") or not isinstance(entries, list):
            raise InvalidInput("tool_choice", choice, "allowed_tools needs a mode and tools")
        found = set()
        for entry in entries:
            function = entry.get("function", entry) if isinstance(entry, dict) else None
            name = function.get("name") if isinstance(function, dict) else None
            _check_declared(name, names, choice)
            found.add(str(name))
        return mode, frozenset(found)
    raise InvalidInput("tool_choice", choice, "unknown type")


def _check_declared(name: Any, names: list[str], choice: Any) -> None:
    if name not in names:
        raise InvalidInput("tool_choice", choice, "names a tool that is not in `tools`")


def _first_error(error: ValidationError) -> InvalidInput:
    """The deepest complaint: of a union's branches, the one that came furthest."""
    details: ErrorDetails = max(error.errors(), key=lambda detail: len(detail["loc"]))
    field = ""
    for step in details["loc"]:
        if isinstance(step, int):
            field += f"[{step}]"
        elif step.isidentifier() and step not in _BRANCHES:
            field += f".{step}" if field else step
    return InvalidInput(field, details["input"], details["msg"])


# Names that pydantic gives to the branches of a union: they are no part of a field's path.
_BRANCHES = frozenset(("str", "int", "list", "dict", "_Part", "none"))
