# SPDX-License-Identifier: Apache-2.0
"""Templates run in a process of their own: hostile ones are stopped, the next request works."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from glmserve.errors import CheckpointError, InvalidInput
from glmserve.text.render_worker import RenderWorker
from glmserve.text.template import TemplateFailure, TemplateSource

# Misbehaves as the first message asks, so that one worker can show that it recovers.
HOSTILE = """
{%- set wish = messages[0].content -%}
{%- if wish == 'loop' -%}
{%- for a in range(99999) -%}{%- for b in range(99999) -%}{%- endfor -%}{%- endfor -%}
{%- elif wish == 'memory' -%}
{{- (wish * 10 ** 10) | length -}}
{%- elif wish == 'growth' -%}
{%- set n = namespace(x=wish * 100) -%}
{%- for a in range(99999) -%}{%- set n.x = n.x + n.x -%}{%- endfor -%}
{%- elif wish == 'internals' -%}
{{- ''.__class__.__base__.__subclasses__() -}}
{%- elif wish == 'fail' -%}
{{- raise_exception('roles must alternate') -}}
{%- else -%}
hello {{ wish }}
{%- endif -%}
"""
SECONDS = 60.0  # nothing but a loop reaches them


@pytest.fixture(scope="module")
def worker() -> Iterator[RenderWorker]:
    with closing(RenderWorker(TemplateSource(HOSTILE), seconds=SECONDS, memory=2**29)) as worker:
        yield worker


@pytest.fixture
def hasty() -> Iterator[RenderWorker]:
    with closing(RenderWorker(TemplateSource(HOSTILE), seconds=2.0, memory=2**29)) as worker:
        yield worker


def ask(worker: RenderWorker, wish: str) -> str:
    return worker.render({"messages": [{"role": "user", "content": wish}]})


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ("memory", "MemoryError"),
        ("growth", "MemoryError"),
        ("internals", "refused"),
        ("fail", "roles must alternate"),
    ],
)
def test_a_misbehaving_template_is_stopped_and_the_next_request_served(
    worker: RenderWorker, wish: str, message: str
) -> None:
    with pytest.raises(TemplateFailure, match=message):
        ask(worker, wish)
    assert ask(worker, "é") == "hello é"


def test_an_endless_template_is_stopped_and_the_next_request_served(hasty: RenderWorker) -> None:
    with pytest.raises(TemplateFailure, match="took longer than 2 s"):
        ask(hasty, "loop")  # it would take minutes
    assert ask(hasty, "é") == "hello é"


@pytest.mark.parametrize(
    "hostile", ["{{ 'x' * 10 ** 10 }}", "{{ 3 ** (10 ** 9) }}", "{{ [0] * 10 ** 9 }}", "{% if %}"]
)
def test_constants_are_worked_out_inside_the_limits(hostile: str) -> None:
    # Jinja computes constants when it compiles, before anything is rendered.
    started = time.monotonic()
    with (
        pytest.raises((CheckpointError, TemplateFailure), match="chat template"),
        closing(RenderWorker(TemplateSource(hostile), seconds=1.0, memory=2**29)) as worker,
    ):
        ask(worker, "x")
    assert time.monotonic() - started < 60  # 3 ** (10 ** 9) alone takes minutes


def test_a_killed_process_is_replaced(worker: RenderWorker) -> None:
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while True:
        try:
            assert ask(worker, "again") == "hello again"
            return
        except TemplateFailure:  # the kill came while the request was under way
            assert time.monotonic() < deadline


def test_errors_of_the_request_keep_their_type(worker: RenderWorker) -> None:
    with pytest.raises(InvalidInput, match="continue_final_message"):
        worker.render(
            {
                "messages": [{"role": "user", "content": "x"}],
                "continue_final_message": True,
            }
        )


def test_closing_ends_the_process() -> None:
    worker = RenderWorker(TemplateSource("{{ messages[0].content }}"))
    pid = worker.pid
    assert pid is not None
    worker.close()
    assert worker.pid is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
