# SPDX-License-Identifier: Apache-2.0
"""What the output side of one request needs to know, fixed before generation starts.

`OutputOptions` is made where the prompt is made and travels to the output stage as JSON. Sampling
parameters are not its business.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from glmserve.errors import InvalidInput

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024  # characters of one stop string
UnknownTool = Literal["drop", "forward"]
StopScope = Literal["raw", "content"]
ParserStart = Literal["off", "reasoning", "content", "auto"]


@dataclass(frozen=True)
class StopOptions:
    """Stop strings and how they count. `token_ids` are the request's own stop_token_ids."""

    strings: tuple[str, ...] = ()
    include: bool = False
    scope: StopScope = "raw"
    min_tokens: int = 0
    token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Raises InvalidInput naming `stop`, `stop_scope` or `min_tokens`."""
        object.__setattr__(self, "strings", tuple(self.strings))
        object.__setattr__(self, "token_ids", tuple(self.token_ids))
        if len(self.strings) > MAX_STOP_STRINGS:
            raise InvalidInput("stop", len(self.strings), f"at most {MAX_STOP_STRINGS} strings")
        for string in self.strings:
            if not isinstance(string, str) or not string:
                raise InvalidInput("stop", string, "a stop string must not be empty")
            if len(string) > MAX_STOP_LENGTH:
                raise InvalidInput("stop", string, f"longer than {MAX_STOP_LENGTH} characters")
        if self.scope not in ("raw", "content"):
            raise InvalidInput("stop_scope", self.scope, "must be raw or content")
        if self.min_tokens < 0:
            raise InvalidInput("min_tokens", self.min_tokens, "must not be negative")


@dataclass(frozen=True)
class OutputOptions:
    """How the generated ids become fields of the answer.

    start: the parser's first state, read from the prompt's end (`start_state`); "off" means that
      all text goes out as it is.
    mid_text: the prompt ends inside the answer's text, so leading white space is not the turn's.
    tools: the request's tool list (OpenAI's shape), None if it has none.
    tool_choice: auto, none, required, or the name in `{"function": {"name": ...}}` as "named:NAME".
    """

    start: ParserStart = "off"
    mid_text: bool = False
    tools: tuple[dict[str, Any], ...] | None = None
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    unknown_tool: UnknownTool = "drop"
    stop: StopOptions = field(default_factory=StopOptions)

    def to_json(self) -> str:
        """Compact ASCII JSON; `from_json` gives an equal object."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, source: str | bytes) -> OutputOptions:
        """The inverse of `to_json`; meant for our own output, not for clients' input."""
        values = json.loads(source)
        tools = values["tools"]
        return cls(
            **{
                **values,
                "stop": StopOptions(**values["stop"]),
                "tools": None if tools is None else tuple(tools),
            }
        )
