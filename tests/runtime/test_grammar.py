# SPDX-License-Identifier: Apache-2.0
"""Structured output through the real engine on random weights, fp64: valid, equal over drafts."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from glmserve.checkpoint.synthetic import make_checkpoint
from glmserve.config import EngineConfig
from glmserve.engine.client import EngineClient
from glmserve.messages import Chunk, DraftScript, Request
from glmserve.sampling_params import SamplingParams
from glmserve.text.grammar import GrammarBuilder
from glmserve.text.output import OutputProcessor
from glmserve.text.output_constraint import take_constraint
from glmserve.text.output_options import OutputOptions
from glmserve.text.parse_text import ParsedAnswer
from glmserve.text.tokenizer import Tokenizer
from tests.text.random_schemas import random_schema

EVERY = 200
FEW = 6
DRAFTS = 2
TOOLS: tuple[dict[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 12},
                    "days": {"type": "integer", "minimum": 1, "maximum": 14},
                    "units": {"enum": ["c", "f"]},
                    "place": {
                        "type": "object",
                        "properties": {"lat": {"type": "integer"}, "sea": {"type": "boolean"}},
                        "required": ["lat"],
                    },
                },
                "required": ["city", "days"],
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
)


class Case:
    """A request with a grammar, and how its answer is read."""

    def __init__(self, uid: str, constraint: dict[str, Any], options: OutputOptions) -> None:
        self.uid, self.constraint, self.options = uid, constraint, options
        self.settings: dict[str, Any] = {"temperature": 1.0, "seed": len(uid), "max_tokens": 400}


class World:
    """A tiny checkpoint with its tokenizer and its grammars, and engines that serve it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tokenizer = Tokenizer(directory)
        self.builder = GrammarBuilder(self.tokenizer)
        self._engines: dict[str, EngineClient] = {}  # by settings; most of a test is their start

    def engine(self, **settings: Any) -> EngineClient:
        key = json.dumps(settings, sort_keys=True)
        if key not in self._engines:
            values = {"checkpoint": str(self.directory), "num_pages": 256, "max_rows": 16}
            self._engines[key] = EngineClient.start(EngineConfig(**values | settings))
        return self._engines[key]

    def close(self) -> None:
        for client in self._engines.values():
            client.close()

    def request(self, case: Case, script: DraftScript | None = None) -> Request:
        grammar = self.builder.build(take_constraint(dict(case.constraint)), case.options)
        assert grammar is not None
        sampling = SamplingParams(
            grammar=grammar.text, grammar_after=grammar.after, **case.settings
        )
        prompt = np.random.default_rng(sum(map(ord, case.uid))).integers(0, 900, 20)
        return Request(case.uid, prompt.astype(np.int32), sampling, script)

    def run(
        self,
        cases: Iterable[Case],
        others: Iterable[Request] = (),
        scripts: Mapping[str, DraftScript] | None = None,
        **settings: Any,
    ) -> dict[str, list[Chunk]]:
        """All cases and other requests at once; every chunk of each. `scripts`: drafts to use."""
        client = self.engine(**settings)
        made = [self.request(case, (scripts or {}).get(case.uid)) for case in cases]
        chunks: dict[str, list[Chunk]] = {}
        for request in (*made, *others):
            chunks[request.uid] = []
            client.submit(request)
        deadline = time.monotonic() + 240
        while not all(got and got[-1].finish_reason for got in chunks.values()):
            assert time.monotonic() < deadline
            for chunk in client.receive(5.0):
                chunks[chunk.uid].append(chunk)
        return chunks

    def answer(self, case: Case, chunks: Iterable[Chunk]) -> dict[str, Any]:
        """What a client reads, streamed chunk by chunk."""
        output = OutputProcessor(self.tokenizer, case.options)
        answer = ParsedAnswer()
        for chunk in chunks:
            answer.add(output.push(chunk.token_ids, chunk.finish_reason))
        return answer.as_dict()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    directory = tmp_path_factory.mktemp("tiny")
    make_checkpoint(directory, "tiny", 3)
    made = World(directory)
    yield made
    made.close()


def case_list(world: World) -> list[Case]:
    """Every kind of grammar and of tool_choice; half of the tool cases think first."""
    think_end = world.tokenizer.marker_id("</think>")
    constraints: dict[str, dict[str, Any]] = {
        "regex": {"structured_outputs": {"regex": r"[a-z]{1,8}@[a-z]{2,5}\.(com|org)"}},
        "choice": {"guided_choice": ["yes", "no", "größer als 3"]},
        "lark": {"structured_outputs": {"grammar": 'start: "a" NUMBER\nNUMBER: /[0-9]{3,9}/'}},
        "gbnf": {"guided_grammar": 'root ::= "[" item ("," item){2} "]"\nitem ::= [a-f]'},
        "think": {"guided_json": {"type": "array", "items": {"type": "integer"}, "maxItems": 3}},
    }
    made = [
        Case(uid, c, OutputOptions(start="reasoning" if uid == "think" else "content"))
        for uid, c in constraints.items()
    ]
    for uid, choice, tools, start, many in (
        ("required", "required", TOOLS, "reasoning", True),
        ("one-call", "required", TOOLS, "content", False),
        ("named", "named:get_weather", TOOLS[:1], "reasoning", True),
        ("allowed", "required", TOOLS[1:], "content", False),
    ):
        options = OutputOptions(
            start=start,  # type: ignore[arg-type]
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=many,
        )
        made.append(Case(uid, {}, options))
    for number, case in enumerate(made):
        case.settings |= {"seed": number, "temperature": 0.0 if number % 4 == 1 else 1.0}
        if case.options.start == "reasoning":  # so that random weights stop thinking
            case.settings["logit_bias"] = ((think_end, 4.0),)
    return made


def check_cases(world: World, cases: list[Case], chunks: dict[str, list[Chunk]]) -> None:
    answers = {case.uid: world.answer(case, chunks[case.uid]) for case in cases}
    assert all(chunks[case.uid][-1].finish_reason == "stop" for case in cases)
    content = {uid: answer["content"] for uid, answer in answers.items()}
    assert re.fullmatch(r"[a-z]{1,8}@[a-z]{2,5}\.(com|org)", content["regex"])
    assert content["choice"] in ("yes", "no", "größer als 3")
    assert re.fullmatch("a[0-9]{3,9}", content["lark"])
    assert re.fullmatch(r"\[[a-f],[a-f],[a-f]\]", content["gbnf"])
    assert all(isinstance(item, int) for item in json.loads(content["think"]))
    assert answers["think"]["reasoning_content"]
    declared = {tool["function"]["name"]: tool["function"] for tool in TOOLS}
    for uid in ("required", "one-call", "named", "allowed"):
        calls = answers[uid]["tool_calls"]
        assert content[uid] is None
        assert len(calls) >= 1 if uid == "required" else len(calls) == 1
        for call in calls:
            function = declared[call["name"]]
            jsonschema.validate(call["arguments"], function.get("parameters", {}))
    assert answers["named"]["tool_calls"][0]["name"] == "get_weather"
    assert answers["allowed"]["tool_calls"][0] == {"name": "now", "arguments": {}}
    for uid in ("required", "named"):
        assert answers[uid]["reasoning_content"]


def tokens_of(chunks: dict[str, list[Chunk]]) -> dict[str, list[int]]:
    return {uid: [t for chunk in got for t in chunk.token_ids] for uid, got in chunks.items()}


def schema_cases(count: int) -> list[Case]:
    cases = []
    for seed in range(count):
        schema = random_schema(seed)
        constraint = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
        case = Case(f"schema-{seed}", constraint, OutputOptions(start="content"))
        case.settings["seed"] = seed
        if seed % 3 == 0:
            case.settings["temperature"] = 0.0
        cases.append(case)
    return cases


def check_schemas(world: World, cases: list[Case], chunks: dict[str, list[Chunk]]) -> None:
    ended = 0
    for case in cases:
        last = chunks[case.uid][-1]
        assert last.finish_reason in ("stop", "length"), last.error
        if last.finish_reason == "stop":
            ended += 1
            text = world.answer(case, chunks[case.uid])["content"]
            schema = case.constraint["response_format"]["json_schema"]["schema"]
            jsonschema.validate(json.loads(text), schema)
    assert ended >= 0.95 * len(cases), f"{ended} of {len(cases)} ended by themselves"


def test_answers_satisfy_their_schemas_and_do_not_depend_on_drafts(world: World) -> None:
    cases = schema_cases(FEW)
    plain = world.run(cases)
    drafted = world.run(cases, drafts=DRAFTS)
    check_schemas(world, cases, plain)
    assert tokens_of(drafted) == tokens_of(plain)
    assert [got[-1].finish_reason for got in drafted.values()] == [
        got[-1].finish_reason for got in plain.values()
    ]


@pytest.fixture(scope="module")
def plain(world: World) -> dict[str, list[int]]:
    """Tokens of `case_list`, all at once, without drafts."""
    cases = case_list(world)
    chunks = world.run(cases)
    check_cases(world, cases, chunks)
    return tokens_of(chunks)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"drafts": 3}, id="drafts-3"),
        pytest.param({"drafts": 1, "num_pages": 16, "max_rows": 3}, id="drafts-1-few-pages"),
        pytest.param({"steps_in_flight": 1, "chunk": 7}, id="one-step-chunk-7"),
        pytest.param({"ranks": 2, "drafts": 2}, id="2-ranks-drafts-2"),
    ],
)
def test_every_kind_of_grammar_gives_the_same_tokens(
    world: World, plain: dict[str, list[int]], settings: dict[str, Any]
) -> None:
    cases = case_list(world)
    chunks = world.run(cases, **settings)
    assert tokens_of(chunks) == plain
    check_cases(world, cases, chunks)


@pytest.mark.parametrize("wrong_at", [None, 1])
def test_right_drafts_are_accepted_under_a_grammar(
    world: World, plain: dict[str, list[int]], wrong_at: int | None
) -> None:
    cases = case_list(world)
    scripts = {
        uid: DraftScript(np.asarray(tokens, dtype=np.int32), wrong_at)
        for uid, tokens in plain.items()
    }
    chunks = world.run(cases, scripts=scripts, drafts=3)
    assert tokens_of(chunks) == plain
    accepted = 3 if wrong_at is None else wrong_at
    for uid, tokens in plain.items():
        passes = sum(bool(chunk.token_ids) for chunk in chunks[uid])
        assert passes == 1 + -(-(len(tokens) - 1) // (accepted + 1)), uid


def test_a_grammar_that_fails_ends_its_own_request_alone(
    world: World, plain: dict[str, list[int]]
) -> None:
    cases = case_list(world)
    prompt = np.arange(30, dtype=np.int32)

    def other(uid: str, **settings: Any) -> Request:
        return Request(uid, prompt, SamplingParams(max_tokens=20, seed=1, **settings))

    others = [
        other("bad", grammar="start: nothing"),
        other("dead end", grammar='start: "a" b\nb: b "x"'),
        other("clash", grammar='start: "hello"', allowed_token_ids=(5, 6), top_k=3, top_p=0.8),
        other("cut", grammar='start: "a" /[0-9]{50}/'),
        other("free", ignore_eos=True),
    ]
    chunks = world.run(cases, others, drafts=2)
    assert {uid: t for uid, t in tokens_of(chunks).items() if uid in plain} == plain
    last = {request.uid: chunks[request.uid][-1] for request in others}
    for uid, reason in (
        ("bad", "unknown name"),
        ("dead end", "cannot be followed"),
        ("clash", "other settings"),
    ):
        assert (last[uid].finish_reason, last[uid].error_code) == ("error", "INVALID_ARG")
        assert reason in last[uid].error
    assert (last["cut"].finish_reason, last["cut"].num_output_tokens) == ("length", 20)
    assert (last["free"].finish_reason, last["free"].num_output_tokens) == ("length", 20)


def test_a_grammars_end_ends_an_answer_that_ignores_eos_or_wants_more_tokens(world: World) -> None:
    case = Case("short", {"guided_regex": "ab{0,40}"}, OutputOptions(start="content"))
    case.settings |= {"ignore_eos": True, "min_tokens": 8}
    shorter = Case("shorter", {"guided_regex": "a"}, OutputOptions(start="content"))
    shorter.settings |= {"min_tokens": 8}
    chunks = world.run([case, shorter], drafts=2)
    assert chunks["short"][-1].finish_reason == "stop"
    tokens = [token for chunk in chunks["short"] for token in chunk.token_ids]
    assert len(tokens) > 8
    assert tokens[-1] in world.tokenizer.eos_token_ids
    last = chunks["shorter"][-1]
    assert (last.finish_reason, last.num_output_tokens) == ("stop", 2)


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [0, DRAFTS])
def test_answers_satisfy_200_random_schemas(world: World, drafts: int) -> None:
    cases = schema_cases(EVERY)
    check_schemas(world, cases, world.run(cases, drafts=drafts))
