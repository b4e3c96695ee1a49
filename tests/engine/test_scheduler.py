# SPDX-License-Identifier: Apache-2.0
"""The scheduler and the loop against ranks that check every plan."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glmserve.config import EngineConfig
from glmserve.engine.chunk_reader import ChunkReader
from glmserve.engine.loop import EngineLoop
from glmserve.engine.scheduler import Scheduler
from glmserve.messages import Cancel, Chunk, Request, encode
from glmserve.parallel.launcher import RING_BYTES
from glmserve.sampling_params import SamplingParams
from tests.engine.fake_ranks import VOCAB, FakeRanks, expected_output

EOS = (3,)


class Harness:
    def __init__(self, seed: int = 0, **settings: object) -> None:
        values = {"checkpoint": "none", "num_pages": 40, "max_rows": 8, "chunk": 16} | settings
        self.config = EngineConfig(**values).with_limits(1 << 20)  # type: ignore[arg-type]
        self.scheduler = Scheduler(self.config, EOS)
        self.ranks = FakeRanks(self.config, seed)
        self.chunks: list[Chunk] = []
        self.now = 100.0  # seconds, for deadlines and for how far ahead steps are planned
        reader = ChunkReader()
        self.loop = EngineLoop(
            self.scheduler,
            self.ranks,
            lambda update: self.chunks.extend(reader.read(update)),
            clock=lambda: self.now,
        )

    def run(self, limit: int = 100_000) -> None:
        for _ in range(limit):
            if not self.loop.step():
                assert self.scheduler.idle
                return
        raise AssertionError("the engine does not come to rest")

    def output(self, uid: str) -> list[int]:
        mine = [chunk for chunk in self.chunks if chunk.uid == uid]
        assert [chunk.number for chunk in mine] == list(range(len(mine)))
        assert [c.finish_reason is not None for c in mine] == [False] * (len(mine) - 1) + [True]
        tokens = [token for chunk in mine for token in chunk.token_ids]
        assert mine[-1].num_output_tokens == len(tokens)
        return tokens

    def finish(self, uid: str) -> str | None:
        return next(c.finish_reason for c in self.chunks if c.uid == uid and c.finish_reason)


def make_request(uid: str, prompt: list[int], max_tokens: int, **settings: object) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, **settings)  # type: ignore[arg-type]
    return Request(uid, np.asarray(prompt, dtype=np.int32), sampling)


def prompt_of(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(4, VOCAB), k=length)


def test_one_request_gives_the_models_tokens() -> None:
    harness = Harness()
    prompt = prompt_of(50, 1)
    harness.loop.take([make_request("a", prompt, 30, ignore_eos=True)])
    harness.run()
    assert harness.output("a") == expected_output(prompt, 30, ())
    assert harness.finish("a") == "length"
    assert [p.prefill[0].length for p in harness.ranks.plans[:4]] == [16, 16, 16, 2]


def test_a_stop_id_ends_a_request_and_is_named() -> None:
    harness = Harness()
    prompt = next(
        p for p in (prompt_of(20, s) for s in range(500)) if 3 in expected_output(p, 40, ())
    )
    harness.loop.take([make_request("a", prompt, 60)])
    harness.run()
    assert harness.output("a") == expected_output(prompt, 60, EOS)
    assert harness.finish("a") == "stop"
    assert harness.chunks[-1].stop_token == 3


def test_rows_decode_while_another_prompt_is_prefilled() -> None:
    harness = Harness()
    harness.loop.take([make_request("a", prompt_of(10, 1), 40, ignore_eos=True)])
    for _ in range(3):
        harness.loop.step()
    harness.loop.take([make_request("b", prompt_of(100, 2), 5, ignore_eos=True)])
    harness.run()
    assert any(plan.decode and plan.prefill for plan in harness.ranks.plans)
    assert harness.output("b") == expected_output(prompt_of(100, 2), 5, ())


def test_no_step_is_planned_after_max_tokens() -> None:
    harness = Harness()
    harness.loop.take([make_request("a", prompt_of(10, 1), 5, ignore_eos=True)])
    harness.run()
    assert len(harness.ranks.plans) == 5  # one prefill that samples, four decodes


def test_a_full_queue_refuses_with_its_length() -> None:
    harness = Harness(max_queue=2)
    harness.loop.take([make_request(str(i), prompt_of(5, i), 2) for i in range(3)])
    refused = harness.chunks[0]
    assert (refused.uid, refused.error_code, refused.finish_reason) == ("2", "UNAVAILABLE", "error")
    assert "2 requests" in refused.error
    harness.run()


@pytest.mark.parametrize("steps_before", [0, 1, 3, 9])
def test_cancel_ends_a_request_at_any_time_and_frees_its_pages(steps_before: int) -> None:
    harness = Harness()
    harness.loop.take(
        [make_request("a", prompt_of(40, 1), 50, ignore_eos=True), make_request("b", [5, 6], 20)]
    )
    for _ in range(steps_before):
        harness.loop.step()
    harness.loop.take([Cancel("a"), Cancel("unknown")])
    harness.run()
    assert harness.finish("a") == "abort"
    assert harness.output("b") == expected_output([5, 6], 20, EOS)
    assert harness.scheduler.roster.pool.free == harness.scheduler.roster.pool.capacity


def test_running_out_of_pages_preempts_and_changes_nothing() -> None:
    harness = Harness(num_pages=9, max_rows=6)
    prompts = {str(i): prompt_of(60 + i, i) for i in range(6)}
    harness.loop.take(
        [make_request(uid, prompt, 150, ignore_eos=True) for uid, prompt in prompts.items()]
    )
    harness.run()
    assert harness.scheduler.roster.preemptions > 0
    for uid, prompt in prompts.items():
        assert harness.output(uid) == expected_output(prompt, 150, ())


def test_prompts_that_hold_every_page_do_not_block_each_other() -> None:
    harness = Harness(num_pages=9, max_rows=4, chunk=256)
    prompts = {str(i): prompt_of(400, i) for i in range(3)}
    harness.loop.take([make_request(uid, p, 40, ignore_eos=True) for uid, p in prompts.items()])
    harness.run()
    for uid, prompt in prompts.items():
        assert harness.output(uid) == expected_output(prompt, 40, ())


def test_a_long_prompt_leaves_room_for_a_short_one() -> None:
    harness = Harness(num_pages=60, chunk=64)
    harness.loop.take([make_request("long", prompt_of(2000, 1), 2, ignore_eos=True)])
    harness.loop.step()
    harness.loop.take([make_request("short", prompt_of(30, 2), 2, ignore_eos=True)])
    harness.run()
    ends = [chunk.uid for chunk in harness.chunks if chunk.finish_reason]
    assert ends == ["short", "long"]


def test_decoding_rows_leave_a_quarter_of_the_step_to_prompts() -> None:
    harness = Harness(chunk=8, max_rows=8, num_pages=60)
    harness.loop.take(
        [make_request(str(i), prompt_of(4, i), 60, ignore_eos=True) for i in range(7)]
    )
    for _ in range(20):
        harness.loop.step()
    harness.loop.take([make_request("late", prompt_of(40, 9), 2, ignore_eos=True)])
    harness.run()
    late = [c.length for p in harness.ranks.plans if len(p.decode) == 7 for c in p.prefill]
    assert late and set(late) == {2}


def test_priority_decides_who_enters_and_who_is_preempted() -> None:
    harness = Harness(max_rows=1)
    for uid, priority in (("a", 0), ("b", 5), ("c", -1), ("d", 0)):
        harness.loop.take([make_request(uid, [5, 6, 7], 3, ignore_eos=True, priority=priority)])
    harness.run()
    assert [c.uid for c in harness.chunks if c.finish_reason] == ["c", "a", "d", "b"]

    harness = Harness(num_pages=7, max_rows=3)
    for uid, priority in (("low", 9), ("high", 0), ("middle", 1)):
        prompt = prompt_of(60, 40 + priority)
        harness.loop.take([make_request(uid, prompt, 120, ignore_eos=True, priority=priority)])
    harness.run()
    assert harness.scheduler.roster.preemptions > 0
    assert [c.uid for c in harness.chunks if c.finish_reason] == ["high", "middle", "low"]


def test_a_deadline_ends_a_request_with_what_it_has() -> None:
    harness = Harness()
    harness.loop.take(
        [
            make_request("late", prompt_of(9, 1), 200, ignore_eos=True, deadline=2.0),
            make_request("other", prompt_of(9, 2), 20, ignore_eos=True, deadline=50.0),
        ]
    )
    for _ in range(6):
        harness.loop.step()
    harness.now += 2.5
    harness.loop.take([])
    harness.run()
    last = next(c for c in harness.chunks if c.uid == "late" and c.finish_reason)
    assert (last.finish_reason, last.error) == ("abort", "the request's deadline of 2 s has passed")
    got = harness.output("late")
    assert 0 < len(got) < 20 and got == expected_output(prompt_of(9, 1), 200, ())[: len(got)]
    assert harness.output("other") == expected_output(prompt_of(9, 2), 20, ())


def test_statistics_count_what_happened() -> None:
    harness = Harness(drafts=2, chunk=64)
    prompt = prompt_of(130, 1)
    for uid in ("a", "b"):
        harness.loop.take([make_request(uid, prompt, 30, ignore_eos=True)])
        harness.run()
    harness.loop.take([make_request("c", prompt_of(5, 2), 30, ignore_eos=True), Cancel("c")])
    harness.run()
    stats = harness.scheduler.snapshot()
    assert stats.finished == {"length": 2, "abort": 1}
    assert (stats.prompt_tokens, stats.cached_tokens) == (265, 128)
    assert stats.generated_tokens == 60
    decodes = sum(len(plan.decode) for plan in harness.ranks.plans)
    accepted = sum(stats.accepted_by_position)
    assert 0 < accepted == 60 - 2 - (stats.drafted_tokens // 2)  # each pass gives one and these
    assert stats.drafted_tokens <= 2 * decodes
    assert stats.accepted_by_position[0] >= stats.accepted_by_position[1]
    assert (stats.running, stats.waiting, stats.free_pages) == (0, 0, stats.pages)


def test_limits_leave_room_for_the_longest_request() -> None:
    config = EngineConfig("none", num_pages=9, drafts=3).with_limits(1 << 20)
    assert config.max_model_len == 8 * 64 - config.lookahead
    harness = Harness(num_pages=9, drafts=3)
    length = harness.config.max_model_len - 10
    harness.loop.take([make_request("a", prompt_of(length, 3), 10, ignore_eos=True)])
    harness.run()
    assert harness.output("a") == expected_output(prompt_of(length, 3), 10, ())


def test_steps_in_flight_ask_for_no_page_past_the_longest_request() -> None:
    """Its page table ends there: the next entry is another row's."""
    drafts = 3
    longest = 4 * 64 - (2 * drafts + 1)
    harness = Harness(num_pages=20, drafts=drafts, max_model_len=longest)
    assert harness.config.pages_per_row == 4
    harness.loop.take([make_request("a", prompt_of(longest - 30, 3), 30, ignore_eos=True)])
    harness.run()
    assert len(harness.output("a")) == 30
    grants = [grant for plan in harness.ranks.plans for grant in plan.grants]
    assert max(grant.start + len(grant.pages) for grant in grants) == 4


def test_a_second_run_of_a_prompt_computes_only_its_last_page() -> None:
    harness = Harness(chunk=64)
    prompt = prompt_of(300, 1)
    for uid in ("cold", "hit"):
        computed = harness.ranks.computed
        harness.loop.take([make_request(uid, prompt, 20, ignore_eos=True)])
        harness.run()
        assert harness.output(uid) == expected_output(prompt, 20, ())
        cached = 0 if uid == "cold" else 299 // 64 * 64
        assert [c.num_cached_tokens for c in harness.chunks if c.uid == uid][-1] == cached
        assert harness.ranks.computed - computed == 300 - cached


@pytest.mark.parametrize("length", [64, 65, 128, 129])
def test_a_fully_cached_prompt_still_computes_its_last_token(length: int) -> None:
    harness = Harness(chunk=64)
    for uid in ("cold", "hit"):
        harness.loop.take([make_request(uid, prompt_of(length, 5), 3, ignore_eos=True)])
        harness.run()
        assert harness.output(uid) == expected_output(prompt_of(length, 5), 3, ())
    assert harness.chunks[-1].num_cached_tokens == (length - 1) // 64 * 64


def test_generated_tokens_are_cached_too() -> None:
    harness = Harness(chunk=64)
    prompt = prompt_of(60, 1)
    output = expected_output(prompt, 80, ())
    harness.loop.take([make_request("a", prompt, 80, ignore_eos=True)])
    harness.run()
    harness.loop.take([make_request("b", prompt + output + [9], 4, ignore_eos=True)])
    harness.run()
    assert harness.output("b") == expected_output(prompt + output + [9], 4, ())
    assert harness.chunks[-1].num_cached_tokens == 128


def test_running_requests_share_pages_and_the_oldest_unused_are_evicted() -> None:
    harness = Harness(num_pages=12, max_rows=4, chunk=64)
    shared = prompt_of(128, 1)
    harness.loop.take([make_request("first", shared, 1, ignore_eos=True)])
    harness.run()
    both = {uid: shared + prompt_of(20, seed) for uid, seed in (("a", 7), ("b", 8))}
    harness.loop.take([make_request(uid, p, 30, ignore_eos=True) for uid, p in both.items()])
    harness.loop.step()
    pages = [list(harness.ranks.tables[row])[:2] for row in (0, 1)]
    assert pages[0] == pages[1]
    harness.run()
    for uid, prompt in both.items():
        assert harness.output(uid) == expected_output(prompt, 30, ())
    # 11 pages: three long strangers push the shared prefix out.
    for seed in range(3):
        harness.loop.take([make_request(f"s{seed}", prompt_of(400, 50 + seed), 1)])
        harness.run()
    harness.loop.take([make_request("again", [*shared, 5], 2, ignore_eos=True)])
    harness.run()
    assert harness.chunks[-1].num_cached_tokens == 0
    assert harness.output("again") == expected_output([*shared, 5], 2, ())


def test_a_plan_fits_the_ring_however_many_long_prompts_have_penalties() -> None:
    config = EngineConfig("none", num_pages=30_000, max_rows=16, chunk=8192).with_limits(1 << 20)
    scheduler = Scheduler(config, EOS)
    prompt = np.arange(240_000, dtype=np.int32)
    sampling = SamplingParams(max_tokens=9, repetition_penalty=1.1)
    for i in range(16):
        scheduler.add(Request(str(i), prompt.copy(), sampling))
    plan = scheduler.schedule()
    assert plan is not None and len(plan.admit) == 2
    assert len(encode(plan)) < RING_BYTES


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    data=st.data(),
    seed=st.integers(0, 1000),
    num_pages=st.one_of(st.integers(6, 9), st.integers(6, 30)),
    max_rows=st.integers(1, 5),
    chunk=st.sampled_from([1, 7, 16, 64]),
    drafts=st.integers(0, 3),
    steps_in_flight=st.sampled_from([1, 2, 6, 16]),
    page_seed=st.one_of(st.none(), st.integers(0, 9)),
)
def test_any_mix_of_requests_equals_one_at_a_time(
    data: st.DataObject,
    seed: int,
    num_pages: int,
    max_rows: int,
    chunk: int,
    drafts: int,
    steps_in_flight: int,
    page_seed: int | None,
) -> None:
    harness = Harness(
        seed,
        num_pages=num_pages,
        max_rows=max_rows,
        chunk=chunk,
        drafts=drafts,
        steps_in_flight=steps_in_flight,
        page_seed=page_seed,
    )
    longest = harness.config.max_model_len
    wanted: dict[str, list[int]] = {}
    cancelled = set()
    for i in range(data.draw(st.integers(1, 8))):
        length = data.draw(st.integers(1, min(100, longest - 1)))
        max_tokens = data.draw(st.integers(1, min(80, longest - length)))
        ignore = data.draw(st.booleans())
        # Half of the prompts start with the same tokens.
        common = data.draw(st.integers(0, length)) if i % 2 else 0
        prompt = prompt_of(common, seed) + prompt_of(length - common, seed * 100 + i)
        wanted[str(i)] = expected_output(prompt, max_tokens, () if ignore else EOS)
        harness.loop.take([make_request(str(i), prompt, max_tokens, ignore_eos=ignore)])
        for _ in range(data.draw(st.integers(0, 5))):
            harness.loop.step()
        if data.draw(st.integers(0, 4)) == 0:
            victim = data.draw(st.sampled_from(sorted(wanted)))
            if harness.scheduler.knows(victim):
                cancelled.add(victim)
            harness.loop.take([Cancel(victim)])
    harness.run()
    harness.scheduler.check_integrity()
    assert harness.scheduler.roster.pool.free == harness.scheduler.roster.pool.capacity
    for uid, tokens in wanted.items():
        got = harness.output(uid)
        if uid in cancelled:
            assert harness.finish(uid) == "abort"
            assert got == tokens[: len(got)]
        else:
            assert got == tokens


def test_a_preempted_request_keeps_its_seed() -> None:
    harness = Harness(num_pages=5, max_rows=4)
    requests = [make_request(str(i), prompt_of(60, i), 100, seed=i) for i in range(3)]
    harness.loop.take([dataclasses.replace(r) for r in requests])
    harness.run()
    for plan in harness.ranks.plans:
        for init in plan.admit:
            assert init.seed in (0, 1, 2)
    assert harness.scheduler.roster.preemptions > 0
