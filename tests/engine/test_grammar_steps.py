# SPDX-License-Identifier: Apache-2.0
"""Rows with a grammar in the engine's steps: planned, preempted, cancelled, and failing alone."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher

from glmserve.config import EngineConfig
from glmserve.engine import grammar_state
from glmserve.engine.chunk_reader import ChunkReader
from glmserve.engine.grammar_state import Grammars
from glmserve.engine.loop import EngineLoop
from glmserve.engine.scheduler import Scheduler
from glmserve.errors import CheckpointError
from glmserve.messages import Cancel, Chunk, Request, StepMasks, decode
from glmserve.sampling_params import SamplingParams
from glmserve.text.grammar_vocabulary import GrammarVocabulary
from tests.engine.fake_ranks import VOCAB, FakeRanks, expected_output, next_token
from tests.engine.words import AB, BC, CALL, EOS, LETTERS, THINK_END, A, B, C, vocabulary


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(vocabulary, VOCAB)


class Harness:
    def __init__(self, seed: int = 0, **settings: Any) -> None:
        values = {"checkpoint": "none", "num_pages": 40, "max_rows": 8, "chunk": 16} | settings
        self.config = EngineConfig(**values).with_limits(1 << 20)
        self.made = 0
        self.built = threading.Event()
        made = Grammars(self._vocabulary, VOCAB, self.built.set)
        self.scheduler = Scheduler(self.config, (EOS,), made)
        self.ranks = FakeRanks(self.config, seed)
        self.chunks: list[Chunk] = []
        reader = ChunkReader()
        self.loop = EngineLoop(
            self.scheduler,
            self.ranks,
            lambda update: self.chunks.extend(reader.read(update)),
            clock=lambda: 0.0,  # how far ahead steps are planned does not hang on the machine
        )

    def _vocabulary(self) -> GrammarVocabulary:
        self.made += 1
        return vocabulary()

    def wait_for_grammars(self) -> None:
        while not all(sequence.ready for sequence in self.scheduler.roster.waiting):
            assert self.built.wait(20)
            self.built.clear()

    def run(self) -> None:
        self.wait_for_grammars()
        for _ in range(20_000):
            if not self.loop.step():
                assert self.scheduler.idle
                return
        raise AssertionError("the engine does not come to rest")

    def output(self, uid: str) -> list[int]:
        return [t for chunk in self.chunks if chunk.uid == uid for t in chunk.token_ids]

    def last(self, uid: str) -> Chunk:
        (last,) = [chunk for chunk in self.chunks if chunk.uid == uid and chunk.finish_reason]
        return last


def make_request(uid: str, prompt: list[int], max_tokens: int, **settings: Any) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, **settings)
    return Request(uid, np.asarray(prompt, dtype=np.int32), sampling)


def prompt_of(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(5, VOCAB), k=length)


def expected(
    grammars: Grammars, prompt: list[int], max_tokens: int, text: str, after: int | None = None
) -> list[int]:
    """What a request with a grammar gives alone, one token after the other."""
    matcher = LLMatcher(grammars.vocabulary.tokenizer, text, log_level=0)
    active = after is None
    context, output = list(prompt), list[int]()
    while len(output) < max_tokens and EOS not in output:
        mask = ~grammars.bits((EOS, CALL))
        if active:
            mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint32)
        output.append(next_token(context, mask))
        context.append(output[-1])
        if active and output[-1] != EOS:
            assert matcher.consume_token(output[-1])
        active = active or output[-1] == after
    return output


@pytest.mark.parametrize("drafts", [0, 1, 3])
@pytest.mark.parametrize("steps", [1, 2])
def test_rows_with_a_grammar_follow_it_beside_others(
    grammars: Grammars, drafts: int, steps: int
) -> None:
    harness = Harness(drafts=drafts, steps_in_flight=steps)
    prompts = {str(i): prompt_of(10 + 9 * i, i) for i in range(4)}
    for uid, prompt in prompts.items():
        harness.loop.take([make_request(uid, prompt, 60, grammar=LETTERS)])
        harness.loop.take([make_request(uid + "free", prompt, 30)])
    harness.run()
    for uid, prompt in prompts.items():
        want = expected(grammars, prompt, 60, LETTERS)
        assert harness.output(uid) == want and want[-1] == EOS
        assert (harness.last(uid).finish_reason, harness.last(uid).stop_token) == ("stop", EOS)
        assert harness.output(uid + "free") == expected_output(prompt, 30, (EOS,))
    if drafts == 3:
        assert harness.scheduler.snapshot().accepted_by_position[1] > 0


def test_a_row_with_a_grammar_is_planned_when_none_of_its_draws_is_in_flight() -> None:
    harness = Harness(drafts=1)
    # "free" outlives "bound": a step of its own lies between any two of the other's.
    harness.loop.take([make_request("free", prompt_of(5, 1), 400, ignore_eos=True)])
    harness.loop.take([make_request("bound", prompt_of(5, 2), 60, grammar="start: /[ABC]{20}/")])
    harness.run()
    plans = harness.ranks.plans
    bound = next(init.row for plan in plans for init in plan.admit if init.grammar)
    steps = [plan.step for plan in plans if bound in plan.decode]
    assert all(later - earlier >= 2 for earlier, later in itertools.pairwise(steps))
    assert [p.step for p in plans if p.masks_follow] == sorted(
        {*steps, *(p.step for p in plans for c in p.prefill if c.row == bound and c.final)}
    )
    rows = [plan.decode for plan in plans]
    assert any(len(now) == 1 and len(then) == 2 for now, then in itertools.pairwise(rows))


def test_grammars_survive_preemption(grammars: Grammars) -> None:
    text = "start: /[ABC]{150,200}/"
    harness = Harness(num_pages=7, max_rows=4, drafts=2, steps_in_flight=1)
    prompts = {str(i): prompt_of(40 + i, i) for i in range(4)}
    harness.loop.take([make_request(u, p, 250, grammar=text) for u, p in prompts.items()])
    harness.run()
    assert harness.scheduler.roster.preemptions > 0
    for uid, prompt in prompts.items():
        assert harness.output(uid) == expected(grammars, prompt, 250, text)


def test_thinking_is_free_until_its_end(grammars: Grammars) -> None:
    seen = 0
    for seed in range(8):
        harness = Harness(drafts=2, seed=seed)
        prompt = prompt_of(9, seed)
        request = make_request("a", prompt, 150, grammar=LETTERS, grammar_after=THINK_END)
        harness.loop.take([request])
        harness.run()
        output = harness.output("a")
        assert output == expected(grammars, prompt, 150, LETTERS, THINK_END)
        if THINK_END in output:
            end = output.index(THINK_END)
            assert not {EOS, CALL} & set(output[:end])
            assert set(output[end + 1 :]) <= {A, B, C, AB, BC, EOS}
            seen += harness.last("a").finish_reason == "stop"
    assert seen >= 2


def test_masks_larger_than_a_message_come_in_parts(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_state, "_MESSAGE_BYTES", 1)
    harness = Harness(drafts=1)
    parts: list[int] = []
    send = harness.ranks.send

    def counting(data: bytes, timeout: float | None = None) -> None:
        message = decode(data)
        if isinstance(message, StepMasks):
            parts.append(len(message.rows))
        send(data, timeout)

    monkeypatch.setattr(harness.ranks, "send", counting)
    prompts = {str(i): prompt_of(4, i) for i in range(3)}
    harness.loop.take([make_request(u, p, 40, grammar=LETTERS) for u, p in prompts.items()])
    harness.run()
    assert set(parts) == {1}
    for uid, prompt in prompts.items():
        assert harness.output(uid) == expected(grammars, prompt, 40, LETTERS)


def test_a_bad_grammar_fails_alone(grammars: Grammars) -> None:
    harness = Harness(drafts=1)
    prompt = prompt_of(20, 3)
    harness.loop.take(
        [
            make_request("bad", prompt, 30, grammar="start: nothing"),
            make_request("good", prompt, 40, grammar=LETTERS),
            make_request("free", prompt, 30),
        ]
    )
    harness.run()
    bad = harness.last("bad")
    assert (bad.finish_reason, bad.error_code) == ("error", "INVALID_ARG")
    assert "unknown name" in bad.error
    assert (harness.output("bad"), bad.num_output_tokens) == ([], 0)
    assert harness.output("good") == expected(grammars, prompt, 40, LETTERS)
    assert harness.output("free") == expected_output(prompt, 30, (EOS,))
    assert harness.scheduler.snapshot().finished["error"] == 1


@pytest.mark.parametrize("before", [0, 1, 2, 5])
def test_cancel_ends_a_request_with_a_grammar(grammars: Grammars, before: int) -> None:
    harness = Harness(drafts=2)
    prompts = {uid: prompt_of(40, seed) for seed, uid in enumerate("ab")}
    text = "start: /[ABC]{60,70}/"
    harness.loop.take([make_request(u, p, 80, grammar=text) for u, p in prompts.items()])
    for _ in range(before):
        harness.loop.step()
    harness.loop.take([Cancel("a")])
    harness.run()
    assert harness.last("a").finish_reason == "abort"
    assert harness.output("b") == expected(grammars, prompts["b"], 80, text)
    assert harness.scheduler.roster.pool.free == harness.scheduler.roster.pool.capacity


def test_requests_go_on_while_a_grammar_is_built() -> None:
    harness, gate = Harness(max_rows=2), threading.Event()

    def slow() -> GrammarVocabulary:
        assert gate.wait(20)
        return vocabulary()

    harness.scheduler.grammars = Grammars(slow, VOCAB, harness.built.set)
    harness.loop.take([make_request("bound", prompt_of(5, 1), 5, grammar=LETTERS)])
    harness.loop.take([make_request("free", prompt_of(5, 2), 5, ignore_eos=True)])
    while harness.loop.step():
        pass  # "bound" came first, and waits
    assert [c.uid for c in harness.chunks if c.finish_reason] == ["free"]
    assert not harness.scheduler.idle and not harness.built.is_set()
    harness.loop.take([make_request("third", prompt_of(5, 3), 5, grammar=LETTERS), Cancel("third")])
    gate.set()
    harness.run()
    assert [c.uid for c in harness.chunks if c.finish_reason] == ["free", "third", "bound"]
    assert len(harness.output("bound")) == 5


def test_the_vocabulary_is_made_once_with_the_first_grammar() -> None:
    harness = Harness()
    harness.loop.take([make_request("free", prompt_of(5, 1), 5)])
    harness.run()
    assert harness.made == 0
    for uid in ("a", "b"):
        harness.loop.take([make_request(uid, prompt_of(5, 1), 5, grammar=LETTERS)])
        harness.run()
    assert harness.made == 1


def test_without_a_tokenizer_a_grammar_is_the_requests_error() -> None:
    def missing() -> GrammarVocabulary:
        raise CheckpointError("/secret/path: no tokenizer.json")

    harness = Harness()
    harness.scheduler.grammars = Grammars(missing, VOCAB, harness.built.set)
    harness.loop.take([make_request("a", prompt_of(5, 1), 5, grammar=LETTERS)])
    harness.run()
    assert harness.last("a").error_code == "INVALID_ARG"
    assert "no tokenizer" in harness.last("a").error and "secret" not in harness.last("a").error


def test_following_grammars_loads_no_torch() -> None:
    program = "import sys, glmserve.engine.process, glmserve.text.grammar; print(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    loaded = {name.partition(".")[0] for name in run.stdout.split()}
    assert "llguidance" in loaded and "torch" not in loaded, run.stderr
