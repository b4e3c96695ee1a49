# SPDX-License-Identifier: Apache-2.0
"""From a request to the grammar that its answer must follow, checked before anything is allocated.

A grammar travels to the engine as text (Lark, or llguidance's JSON) with the id of the token that
activates it: `</think>` where the prompt leaves thinking open, none where it holds at once. The
engine follows it (`engine.grammar_state`); this module only makes and checks it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from glmserve.errors import InvalidInput
from glmserve.text import markers
from glmserve.text.grammar_vocabulary import GRAMMAR_LIMITS, grammar_vocabulary
from glmserve.text.json_grammar import prepared
from glmserve.text.output_constraint import OutputConstraint
from glmserve.text.output_options import OutputOptions
from glmserve.text.tokenizer import Tokenizer
from glmserve.text.tool_grammar import CallRules, parameters_field

_WORST = 400  # characters of llguidance's complaint that a client sees


@dataclass(frozen=True)
class Grammar:
    """`text` as LLMatcher takes it; `after`: the token that activates it, None = from the start."""

    text: str
    after: int | None = None


class GrammarBuilder:
    """Makes grammars for one checkpoint; the vocabulary is prepared with the first of them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        return grammar_vocabulary(self._tokenizer).tokenizer

    def build(self, constraint: OutputConstraint | None, options: OutputOptions) -> Grammar | None:
        """The grammar of a request, None when it asks for none.

        `options` say where the answer starts and which calls it may or must make. Raises
        InvalidInput naming the field of what cannot be enforced.
        """
        text = self._text(constraint, options)
        if text is None:
            return None
        after = None
        if options.start == "reasoning":
            after = self._tokenizer.marker_id(markers.THINK_END)
        return Grammar(text, after)

    def _text(self, constraint: OutputConstraint | None, options: OutputOptions) -> str | None:
        tools, choice = options.tools or (), options.tool_choice
        must_call = choice == "required" or choice.startswith("named:")
        many = options.parallel_tool_calls and not choice.startswith("named:")
        if tools and must_call:
            start = f"start: ({{calls}}){'+' if many else ''}"
            return self._with_calls(start, tools)
        may_call = bool(tools) and choice != "none"
        if constraint is None:
            if may_call and any(tool["function"].get("strict") is True for tool in tools):
                return self._with_calls(self._free_start(many), tools)
            return None
        body = _body(constraint)
        self._check(constraint.field, constraint.value, body)
        if not may_call or constraint.kind == "grammar":
            return body
        nested = f"%lark {{\n{body}\n}}"
        return self._with_calls(f"start: ({{calls}}){'+' if many else ''} | {nested}", tools)

    def _with_calls(self, start: str, tools: Sequence[dict[str, Any]]) -> str:
        """Lark text; `start` has {calls} where a call may stand."""
        rules = CallRules(tools, self._tokenizer.marker_id)
        text = "\n".join([start.replace("{calls}", rules.any_call()), *rules.rules])
        if self._error(text):  # say which tool it is
            for tool in tools:
                function = tool["function"]
                alone = "\n".join(
                    ["start: call_0", *CallRules([tool], self._tokenizer.marker_id).rules]
                )
                self._check(parameters_field(function["name"]), function.get("parameters"), alone)
        self._check("tools", [tool["function"]["name"] for tool in tools], text)
        return text

    def _free_start(self, many: bool) -> str:
        """Text with calls in it, for a model that may choose; thinking tags are let through."""
        thinking = [
            f"<[{token}]>"
            for name in (markers.THINK, markers.THINK_END)
            if (token := self._tokenizer.marker_id(name)) is not None
        ]
        between = " | ".join(thinking)
        text = "text: /(?s:.)+/"
        if many:
            return f"start: text? (({' | '.join(['{calls}', *thinking])}) text?)*\n{text}"
        return f"start: text? (({between}) text?)* ({{calls}})?\n{text}"

    def _check(self, field: str, value: Any, text: str) -> None:
        error = self._error(text)
        if error:
            raise InvalidInput(field, value, error)

    def _error(self, text: str) -> str:
        """What llguidance says against a grammar, on one line; empty if it is good."""
        matcher = LLMatcher(self._vocabulary, text, log_level=0, limits=GRAMMAR_LIMITS)
        message: str = matcher.get_error()
        if message:
            return " ".join(message.split("\n   1 |")[0].split())[:_WORST]
        matcher.compute_bitmask()
        return "nothing matches it" if matcher.is_error() else ""


def _body(constraint: OutputConstraint) -> str:
    """Lark text of what the client asks for."""
    value = constraint.value
    if constraint.kind == "json":
        schema = prepared(value, constraint.strict, constraint.whitespace)
        return f"start: %json {json.dumps(schema)}"
    if constraint.kind == "choice":
        return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in value)
    if constraint.kind == "regex":
        made = json.loads(LLMatcher.grammar_from_regex(value))
        return str(made["grammars"][0]["lark_grammar"])
    try:
        return any_to_lark(value)
    except (GbnfToLarkError, ValueError, IndexError, RecursionError) as error:
        raise InvalidInput(constraint.field, value, f"not a grammar: {error}") from None
