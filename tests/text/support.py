# SPDX-License-Identifier: Apache-2.0
"""Cases and ways to feed them: every chunking of an answer must give the same fields."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from glmserve.text.byte_vocabulary import ByteVocabulary, MarkerScanner
from glmserve.text.output import OutputDelta, OutputProcessor
from glmserve.text.output_options import OutputOptions, StopOptions
from glmserve.text.parse_text import ParsedAnswer, parse_text
from glmserve.text.start_state import start_of_text

Case = dict[str, Any]
TESTS = Path(__file__).parent
SPLITS = 400  # positions at which a stream is cut in two
SIZES = range(1, 8)


@functools.cache
def all_cases() -> tuple[Case, ...]:
    path = TESTS.parent / "cases" / "chat_cases.jsonl"
    return tuple(json.loads(line) for line in path.read_bytes().splitlines())


def cases(*kinds: str) -> list[Case]:
    return [case for case in all_cases() if case["kind"] in kinds]


def case_id(case: Case) -> str:
    return str(case["id"])


def options_of(case: Case) -> OutputOptions:
    given = case["options"]
    start = start_of_text(given["prompt_tail"])
    return OutputOptions(
        start=start.start,
        mid_text=start.mid_text,
        tools=tuple(case["tools"]) if case["tools"] else None,
        tool_choice=given.get("tool_choice", "auto"),
        parallel_tool_calls=given.get("parallel_tool_calls", True),
        unknown_tool=given.get("unknown_tool", "drop"),
        stop=StopOptions(
            tuple(given.get("stop", ())),
            given.get("include_stop_str_in_output", False),
            given.get("stop_scope", "raw"),
            given.get("min_tokens", 0),
        ),
    )


def answer_of(deltas: Iterable[OutputDelta]) -> dict[str, Any]:
    """Join deltas as a client does, checking on the way that they only ever append."""
    answer = ParsedAnswer()
    names: list[str] = []
    ended = False
    for delta in deltas:
        assert not ended, "a delta after the last one"
        ended = delta.finish_reason is not None
        for call in delta.tool_calls:
            if "id" in call:
                assert call["index"] == len(names)
                assert call["type"] == "function"
                names.append(call["function"]["name"])
            else:
                # Fragments belong to the newest call: an older one was complete.
                assert set(call) == {"index", "function"}
                assert set(call["function"]) == {"arguments"}
                assert call["index"] == len(names) - 1
        answer.add(delta)
    assert ended
    return answer.as_dict()


def expected(case: Case) -> dict[str, Any]:
    return {"stop_reason": None, **case["expect"]}


def parse_chunks(case: Case, chunks: Iterable[bytes], finish: str = "stop") -> dict[str, Any]:
    """The answer of a text in which markers are found by their spelling."""
    return answer_of(parse_text(chunks, options_of(case), finish))


def token_units(text: str) -> list[int]:
    """Ids of a text over the byte vocabulary: one a byte, one a marker."""
    scanner = MarkerScanner(vocabulary())
    return scanner.push(text.encode()) + scanner.flush()


@functools.cache
def vocabulary() -> ByteVocabulary:
    return ByteVocabulary()


def parse_ids(
    options: OutputOptions,
    groups: Iterable[Sequence[int]],
    vocab: Any = None,
    finish: str = "stop",
) -> dict[str, Any]:
    """The answer of ids that come in groups, the last one with the engine's finish reason."""
    processor = OutputProcessor(vocab or vocabulary(), options)
    deltas = []
    for group in groups:
        deltas.append(processor.push(group))
        if deltas[-1].finish_reason is not None:
            return answer_of(deltas)
    return answer_of([*deltas, processor.push([], finish)])


def in_sizes(items: Any, size: int) -> list[Any]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def in_two(items: Any) -> Iterable[list[Any]]:
    for place in range(1, min(SPLITS, len(items))):
        yield [items[:place], items[place:]]


@st.composite
def chunkings(draw: st.DrawFn, items: Any) -> list[Any]:
    """Cut a sequence at random places."""
    cuts = draw(st.sets(st.integers(0, len(items)), max_size=40))
    places = [0, *sorted(cuts), len(items)]
    return [items[a:b] for a, b in itertools.pairwise(places)]
