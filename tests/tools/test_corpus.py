# SPDX-License-Identifier: Apache-2.0
"""What the small checkpoint is trained on: the served prompt format, splits, weights, packing."""

from __future__ import annotations

import itertools
import random
import re

import numpy as np
import pytest

from glmserve.text.template import ChatTemplate
from tools.tiny import corpus
from tools.tiny.conversation import Conversation, Source, full_text, is_held_out, render
from tools.tiny.decode import prompt_of
from tools.tiny.tasks import arithmetic
from tools.tiny.tokens import TEMPLATE, Encoder, make_tokenizer, rows


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    directory = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(directory, 1024, texts=300)
    return Encoder.of(directory)


def _some(count: int = 300) -> list[Conversation]:
    scored = [c for task in corpus.SCORED for c in corpus.held_out(task, 4, 7)]
    return [*itertools.islice(corpus.training(5), count), *scored]


def test_text_is_what_the_checkpoints_template_renders() -> None:
    template = ChatTemplate(TEMPLATE.read_text("utf-8"))
    for c in _some():
        variables = {"enable_thinking": c.thinking, "reasoning_effort": c.effort}
        whole = template.render(
            c.messages, c.tools or None, add_generation_prompt=False, variables=variables
        )
        assert render(c, c.messages, False) == whole
        prompt = template.render(c.messages[:-1], c.tools or None, variables=variables)
        assert prompt_of(c) == prompt
        if c.messages[-2]["role"] == "user" or c.thinking:
            assert full_text(c).startswith(prompt)


def test_held_out_tools_and_operands_are_not_those_of_training() -> None:
    trained = {
        tool["function"]["name"]
        for c in itertools.islice(corpus.training(5), 1500)
        for tool in c.tools
    }
    scored = {
        tool["function"]["name"]
        for task in ("calls", "report", "refusal")
        for c in corpus.held_out(task, 40, 7)
        for tool in c.tools
    }
    assert len(scored) >= 50
    assert not trained & scored
    assert all(is_held_out(f"tool {name}") for name in scored)
    for held in (True, False):
        source = Source(random.Random(1), held, False)
        for _ in range(200):
            found = re.findall(r"^(\d+) ([-+*]) (\d+)$", arithmetic.make(source).work, re.M)
            assert all(is_held_out("".join(parts)) == held for parts in found)


def test_only_what_the_model_writes_weighs(encoder: Encoder) -> None:
    for c in _some(100):
        ids, weights = encoder.training_ids(c)
        written = encoder.tokenizer.decode(list(ids[weights == 1]), skip_special_tokens=False)
        last = c.messages[-1]
        assert written.endswith(("<|user|>", "<|observation|>"))
        assert str(last["content"]) in written
        if c.thinking:
            assert last["reasoning_content"] + "</think>" in written
        assert "<think>" not in written
        assert "<|assistant|>" not in written


def test_rows_hold_whole_conversations_and_repeat_with_their_seed(encoder: Encoder) -> None:
    one, two = (next(rows(encoder, 3, 512, 4, 300)) for _ in range(2))
    assert (one.ids == two.ids).all()
    other = next(rows(encoder, 4, 512, 4, 300))
    assert (one.ids != other.ids).any()
    start = encoder.tokenizer.token_to_id("[gMASK]")
    for ids, positions, documents in zip(one.ids, one.positions, one.documents, strict=True):
        begins = np.flatnonzero(np.diff(documents, prepend=0) > 0)
        assert (ids[begins] == start).all()
        assert (positions[begins] == 0).all()
        assert documents.max() == len(begins)
