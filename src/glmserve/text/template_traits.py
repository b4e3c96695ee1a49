# SPDX-License-Identifier: Apache-2.0
"""What a chat template does, found out by rendering a few small conversations with it.

GLM releases differ in ways that requests must be adapted to: who sorts tool results, whether
thinking has an off switch, which efforts are known. Asking the template beats asking a version
number, which templates do not carry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from glmserve.errors import GlmServeError

_ASK = [{"role": "user", "content": "q"}]


@dataclass(frozen=True)
class TemplateTraits:
    """Answers of the probes.

    sorts_results: prints tool results in the order of their calls. sorts_partial: also when some
    calls have no result. ignores_order_without_ids: prints them as sent when ids are missing.
    has_off_switch: enable_thinking=false changes the prompt. knows_low: so does a low effort.
    """

    sorts_results: bool
    sorts_partial: bool
    ignores_order_without_ids: bool
    has_off_switch: bool
    knows_low: bool


def probe(render: Callable[[Mapping[str, Any]], str]) -> TemplateTraits:
    """Ask a template; `render` takes ChatTemplate.render's arguments as a mapping.

    A probe that fails counts as "no": a template may refuse tools, for example.
    """

    def ask(messages: list[dict[str, Any]] = _ASK, **variables: Any) -> str | None:
        try:
            return render({"messages": messages, "variables": variables})
        except GlmServeError:
            return None

    plain = ask()
    if plain is None:  # it renders nothing at all: spare it, and us, the other questions
        return TemplateTraits(False, False, False, False, False)
    in_order = ask(_results("abc", "abc"))
    swapped = ask(_results("abc", "bca"))
    missing = ask(_results("abc", "ca"))
    bare = ask(_results("abc", "abc", ids=False))
    sorts = in_order is not None and in_order == swapped
    return TemplateTraits(
        sorts_results=sorts,
        sorts_partial=sorts and missing == ask(_results("abc", "ac")),
        ignores_order_without_ids=sorts
        and bare == in_order
        and bare != ask(_results("abc", "bca", ids=False)),
        has_off_switch=_differ(plain, ask(enable_thinking=False)),
        knows_low=_differ(ask(reasoning_effort="max"), ask(reasoning_effort="low")),
    )


def _differ(left: str | None, right: str | None) -> bool:
    return left is not None and right is not None and left != right


def _results(calls: str, results: str, ids: bool = True) -> list[dict[str, Any]]:
    """A turn with one call a letter of `calls` and results in the order of `results`."""
    called = [
        {"type": "function", "function": {"name": "f", "arguments": {}}}
        | ({"id": letter} if ids else {})
        for letter in calls
    ]
    return [
        *_ASK,
        {"role": "assistant", "content": "", "tool_calls": called},
        *(
            {"role": "tool", "content": f"result {letter}"}
            | ({"tool_call_id": letter} if ids else {})
            for letter in results
        ),
    ]
