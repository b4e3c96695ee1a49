# SPDX-License-Identifier: Apache-2.0
"""Stop strings: earliest completion, minimal hold-back, billing, scope."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glmserve.errors import InvalidInput
from glmserve.text.output import OutputDelta, OutputProcessor
from glmserve.text.output_options import OutputOptions, StopOptions
from glmserve.text.stop import StopMatcher
from tests.text.support import answer_of, in_sizes, token_units, vocabulary

TOOLS = ({"type": "function", "function": {"name": "now"}},)


def _reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Character by character: the first stop (in list order) that the text so far ends with."""
    for end in range(1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(
    text=st.text("ab ", max_size=24),
    stops=st.lists(st.text("ab ", min_size=1, max_size=5), min_size=1, max_size=3),
    include=st.booleans(),
    size=st.integers(1, 5),
)
def test_any_chunking_agrees_with_a_search_by_character(
    text: str, stops: list[str], include: bool, size: int
) -> None:
    matcher = StopMatcher(stops, include)
    shown, waiting, hit = "", "", None
    for number, chunk in enumerate(in_sizes(text, size), start=1):
        waiting += chunk
        release, hit = matcher.push(chunk, number)
        shown, waiting = shown + waiting[:release], waiting[release:]
        if hit is not None:
            break
        assert waiting == matcher.held
        # Only a proper beginning of a stop string may wait.
        assert not waiting or any(stop.startswith(waiting) and stop != waiting for stop in stops)
    assert (shown if hit else shown + waiting, hit) == _reference(text, stops, include)


def test_only_the_longest_possible_beginning_waits() -> None:
    matcher = StopMatcher(["</answer>"])
    assert matcher.push("a < b </ans", 1) == (6, None)
    assert matcher.held == "</ans"
    assert matcher.push("wers", 2) == (9, None)
    assert matcher.held == ""


def _push_all(options: OutputOptions, text: str, size: int = 1) -> tuple[OutputProcessor, Any]:
    processor = OutputProcessor(vocabulary(), options)
    deltas: list[OutputDelta] = []
    for group in in_sizes(token_units(text), size):
        deltas.append(processor.push(group))
        if deltas[-1].finish_reason is not None:
            return processor, deltas
    return processor, [*deltas, processor.push([], "stop")]


@pytest.mark.parametrize("size", [1, 3, 100])
def test_ids_behind_the_stop_are_not_billed(size: int) -> None:
    options = OutputOptions(start="content", stop=StopOptions(("END",)))
    processor, deltas = _push_all(options, "one END two", size)
    assert answer_of(deltas)["content"] == "one "
    assert deltas[-1].stopped
    assert sum(delta.accepted for delta in deltas) == 7
    assert processor.completion_tokens == deltas[-1].completion_tokens == 7


def test_nothing_comes_after_the_stop() -> None:
    options = OutputOptions(start="content", stop=StopOptions(("END",)))
    processor, _ = _push_all(options, "one END")
    late = processor.push(token_units(" two"), "length")
    assert late == OutputDelta(completion_tokens=7)


@pytest.mark.parametrize(
    ("scope", "reasoning", "content"), [("raw", "wait ", ""), ("content", "wait END ok", "so ")]
)
def test_scope_decides_whether_reasoning_is_searched(
    scope: Any, reasoning: str, content: str
) -> None:
    options = OutputOptions(start="reasoning", stop=StopOptions(("END",), scope=scope))
    _, deltas = _push_all(options, "wait END ok</think>so END")
    answer = answer_of(deltas)
    assert (answer["reasoning_content"], answer["content"]) == (reasoning, content)
    assert answer["stop_reason"] == "END"


def test_raw_scope_sees_markup_and_content_scope_does_not() -> None:
    text = "think</think>\n\nyes"
    for scope, content in (("raw", ""), ("content", "yes")):
        stop = StopOptions(("</think>\n",), scope=scope)  # type: ignore[arg-type]
        _, deltas = _push_all(OutputOptions(start="reasoning", stop=stop), text)
        assert answer_of(deltas)["content"] == content


def test_a_tool_call_is_never_cut() -> None:
    stop = StopOptions(("now", "tool"))
    options = OutputOptions(start="content", tools=TOOLS, stop=stop)
    for size in (1, 3, 100):
        _, deltas = _push_all(options, "ok <tool_call>now</tool_call>", size)
        answer = answer_of(deltas)
        assert answer["tool_calls"] == [{"name": "now", "arguments": {}}]
        assert answer["stop_reason"] is None


def test_a_stop_in_text_that_looked_like_a_call_is_found_late_but_billed_right() -> None:
    options = OutputOptions(start="content", tools=TOOLS, stop=StopOptions(("now",)))
    for size in (1, 3, 100):
        processor, deltas = _push_all(options, "<tool_call>now is good", size)
        assert answer_of(deltas)["content"] == "<tool_call>"
        assert processor.completion_tokens == 4  # the marker and three letters


def test_stop_token_of_the_request_is_the_reason_and_not_text() -> None:
    options = OutputOptions(stop=StopOptions(token_ids=(ord("."),)))
    processor = OutputProcessor(vocabulary(), options)
    delta = processor.push(token_units("Yes."), "stop")
    assert (delta.text, delta.stop_reason, delta.finish_reason) == ("Yes", ord("."), "stop")
    assert delta.completion_tokens == 4
    kept = OutputOptions(stop=StopOptions(token_ids=(ord("."),), include=True))
    assert OutputProcessor(vocabulary(), kept).push(token_units("Yes."), "stop").text == "Yes."


def test_engine_eos_is_no_stop_reason() -> None:
    processor = OutputProcessor(vocabulary(), OutputOptions())
    delta = processor.push([ord("a"), vocabulary().ids["<|user|>"]], "stop")
    assert (delta.text, delta.stop_reason, delta.finish_reason) == ("a", None, "stop")


def test_held_text_is_released_at_the_end() -> None:
    options = OutputOptions(start="content", stop=StopOptions(("</done>",)))
    _, deltas = _push_all(options, "a </do")
    assert [delta.text for delta in deltas][-1] == " </do"
    assert answer_of(deltas)["content"] == "a </do"


@pytest.mark.parametrize(
    "wrong",
    [
        {"strings": ("a", "")},
        {"strings": tuple("abcdefghijklmnopq")},
        {"strings": ("x" * 2000,)},
        {"scope": "all"},
        {"min_tokens": -1},
    ],
)
def test_bad_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        StopOptions(**wrong)


def test_options_travel_as_json() -> None:
    options = OutputOptions(
        start="reasoning",
        mid_text=True,
        tools=TOOLS,
        tool_choice="named:now",
        parallel_tool_calls=False,
        unknown_tool="forward",
        stop=StopOptions(("é", "b"), True, "content", 3, (1, 2)),
    )
    assert OutputOptions.from_json(options.to_json()) == options
    assert OutputOptions.from_json(OutputOptions().to_json()) == OutputOptions()
