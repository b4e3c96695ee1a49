# SPDX-License-Identifier: Apache-2.0
"""A long answer leaves nothing behind in its processor but the text that still waits."""

from __future__ import annotations

import tracemalloc

import pytest

from glmserve.text.output import OutputProcessor
from glmserve.text.output_options import OutputOptions, StopOptions
from tests.text.support import token_units, vocabulary

TOOLS = (
    {
        "type": "function",
        "function": {"name": "w", "parameters": {"properties": {"t": {"type": "string"}}}},
    },
)
ARGUMENT = "<tool_call>w<arg_key>t</arg_key><arg_value>"


@pytest.mark.parametrize(
    "opening", ["", "</think>", ARGUMENT], ids=["reasoning", "content", "call"]
)
@pytest.mark.parametrize("stop", [(), ("never comes",)], ids=["", "stop"])
def test_memory_does_not_grow_with_the_answer(opening: str, stop: tuple[str, ...]) -> None:
    options = OutputOptions(start="reasoning", tools=TOOLS, stop=StopOptions(stop))
    processor = OutputProcessor(vocabulary(), options)
    body = token_units('some text, é "x" <\n never \n')
    for token in token_units(opening) + body:
        processor.push([token])
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(1000):
            for token in body:
                processor.push([token])
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert processor.completion_tokens > 20000
    assert after - before < 4096
