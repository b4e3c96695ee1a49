# SPDX-License-Identifier: Apache-2.0
"""Grammars in the engine: masks along drafts, and how rows with a grammar are planned."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from glmserve.config import EngineConfig
from glmserve.engine import grammar_state
from glmserve.engine.chunk_reader import ChunkReader
from glmserve.engine.grammar_state import Grammars, Mask
from glmserve.engine.loop import EngineLoop
from glmserve.engine.scheduler import Scheduler
from glmserve.errors import CheckpointError
from glmserve.messages import Cancel, Chunk, Request, StepMasks, decode
from glmserve.sampling_params import SamplingParams
from glmserve.text.grammar_vocabulary import GrammarVocabulary
from tests.engine.fake_ranks import VOCAB, FakeRanks, expected_output, next_token

EOS, THINK_END, CALL = 3, 2, 4
A, B, C, AB, BC = 5, 6, 7, 65, 66
LETTERS = "start: /[ABC]{4,30}/"


class _Words:
    """Ids 5.. are letters from A on, 65 and 66 two letters each; 2, 3 and 4 are control tokens."""

    eos_token_id, bos_token_id = EOS, None
    special_token_ids = (THINK_END, EOS, CALL)

    def __init__(self) -> None:
        letters = [chr(60 + token).encode() for token in range(5, 65)]
        control = [b"\xff</think>", b"\xff<eos>", b"\xff<tool_call>"]
        self.tokens = [b"0", b"1", *control, *letters, b"AB", b"BC"]
        self.tokens += [f"w{token}".encode() for token in range(len(self.tokens), VOCAB)]

    def __call__(self, text: str) -> list[int]:
        return [ord(character) - 60 for character in text]


def vocabulary() -> GrammarVocabulary:
    made = LLTokenizer(TokenizerWrapper(_Words()), n_vocab=VOCAB, eos_token=[EOS])
    return GrammarVocabulary(made, (EOS,), (EOS, CALL))


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(vocabulary, VOCAB)


def ids_of(mask: Mask) -> set[int]:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return set(bits.nonzero()[0].tolist())


def allowed(grammars: Grammars, text: str, tokens: list[int]) -> set[int]:
    """What a fresh matcher allows after `tokens`."""
    matcher = LLMatcher(grammars.vocabulary.tokenizer, text, log_level=0)
    assert matcher.consume_tokens(tokens) or not tokens
    return ids_of(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint32))


# -- one request's state -----------------------------------------------------------------------


def test_masks_along_drafts_are_those_of_the_tokens_themselves(grammars: Grammars) -> None:
    state = grammars.start(LETTERS, None, (EOS,))
    assert [ids_of(m) for m in state.masks(1, 0)] == [allowed(grammars, LETTERS, [])]
    state.advance([A, BC], (AB, C, A))
    for _ in range(2):  # they leave no trace
        got = [ids_of(mask) for mask in state.masks(4, 0)]
        path = [A, BC, AB, C, A]
        assert got == [allowed(grammars, LETTERS, path[:n]) for n in range(2, 6)]
    assert EOS not in got[0] and EOS in got[1]
    state.advance([AB, A], ())
    assert ids_of(state.masks(1, 0)[0]) == allowed(grammars, LETTERS, [A, BC, AB, A])


def test_masks_stop_where_a_draft_is_forbidden_or_ends_the_answer(grammars: Grammars) -> None:
    for drafts, places in (((A, 9, A), 2), ((9, A, A), 1), ((A, EOS, A), 2), ((VOCAB + 5, A), 1)):
        state = grammars.start('start: "AAA"? /[ABC]*/', None, (EOS,))
        state.advance([], drafts)
        assert len(state.masks(4, 0)) == places
        state.advance([A, A], ())
        assert not state.error
        assert ids_of(state.masks(1, 0)[0]) == {A, B, C, AB, BC, EOS}


def test_at_the_end_only_eos_is_left_also_behind_drafts(grammars: Grammars) -> None:
    state = grammars.start('start: "AB"', None, (EOS,))
    state.advance([A], (B, EOS, A))
    assert [ids_of(mask) for mask in state.masks(4, 0)] == [{B}, {EOS}]
    state.advance([B], (EOS, A, B))
    assert [ids_of(mask) for mask in state.masks(4, 0)] == [{EOS}]
    state.advance([EOS], ())
    assert not state.error


def test_a_grammar_waits_for_its_token_and_nothing_may_end_the_answer_before(
    grammars: Grammars,
) -> None:
    state = grammars.start("start: /A[BC]/", THINK_END, (EOS,))
    before = set(range(VOCAB)) - {EOS, CALL}
    state.advance([C, B], (C, THINK_END, A))
    masks = [ids_of(mask) & set(range(VOCAB)) for mask in state.masks(4, 0)]
    assert masks == [before, before, {A, AB}, {B, C}]
    state.advance([C, THINK_END], (AB,))
    assert [ids_of(mask) for mask in state.masks(2, 0)] == [{A, AB}, {EOS}]
    state.advance([A, B], ())
    assert ids_of(state.masks(1, 0)[0]) == {EOS}


def test_early_places_may_not_end_the_answer_unless_nothing_else_is_left(
    grammars: Grammars,
) -> None:
    state = grammars.start("start: /A{0,2}/", None, (EOS, A))
    state.advance([], (AB,))
    assert [ids_of(mask) for mask in state.masks(1, 1)] == [{A, EOS}]
    state = grammars.start("start: /A{0,2}/", None, (EOS,))
    state.advance([], (A, A))
    assert [ids_of(m) for m in state.masks(3, 2)] == [{A}, {A}, {EOS}]
    assert [ids_of(m) for m in state.masks(3, 3)] == [{A}, {A}, {EOS}]


@pytest.mark.parametrize("text", ["start: nothing", "start: /(?=A)/", 'start: a\na: a "A"'])
def test_a_grammar_that_cannot_be_followed_says_why_and_masks_nothing(
    grammars: Grammars, text: str
) -> None:
    state = grammars.start(text, None, (EOS,))
    masks = state.masks(3, 0)
    assert len(masks) == 1
    assert "cannot be followed" in state.error
    state.advance([A], ())  # changes nothing


def test_a_token_that_the_mask_forbids_is_an_error(grammars: Grammars) -> None:
    state = grammars.start('start: "AB"', None, (EOS,))
    state.masks(1, 0)
    state.advance([C], ())
    assert "other settings" in state.error


def test_a_vocabulary_that_cannot_be_read_is_the_requests_error() -> None:
    def broken() -> GrammarVocabulary:
        raise ValueError("no such file")

    state = Grammars(broken, VOCAB).start(LETTERS, None, (EOS,))
    state.masks(1, 0)
    assert "no such file" in state.error
    state.advance([A], ())


def test_random_walks_leave_matchers_as_fresh_ones(grammars: Grammars) -> None:
    text = 'start: item ("0" item)*\nitem: "A" item? "B" | /C{1,3}/ | "ABC"'
    generator = random.Random(4)
    for _ in range(20):
        state, path = grammars.start(text, None, (EOS,)), []
        while EOS not in path and len(path) < 25:
            truth = allowed(grammars, text, path)
            drafts: list[int] = []
            while len(drafts) < 3 and EOS not in drafts:
                choices = sorted(allowed(grammars, text, path + drafts))
                drafts.append(generator.choice([*choices, A, 9]))
                if drafts[-1] not in choices:
                    break
            state.advance([], tuple(drafts))
            assert ids_of(state.masks(4, 0)[0]) == truth
            token = generator.choice(sorted(truth))
            path.append(token)
            state.advance([token], ())
            assert not state.error


# -- in the scheduler --------------------------------------------------------------------------


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
