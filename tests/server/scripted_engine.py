# SPDX-License-Identifier: Apache-2.0
"""A token source with a script instead of a model, for the server's own tests.

Runs inside the glm_dsa stub (GLMSERVE_ENGINE names this file). The answer to a prompt is the
prompt's ids again and again, `STEP` ids at most a step, up to max_tokens: `answer` says which, so
a test knows the text. A request's `seed` chooses what else happens (see `Act`).
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Self

from glmserve.config import EngineConfig
from glmserve.engine.admission import check_request
from glmserve.errors import EngineError
from glmserve.messages import Chunk, EngineInfo, EngineStats, Request, TokenLogprobs
from glmserve.model_config import ModelConfig

STEP = 3  # ids of a chunk: 1, 2, 3, 1, 2, 3 ...
PAUSE = 0.002  # seconds between two steps
CACHED = 1  # tokens of every prompt that it says it had
LOADING = "GLMSERVE_TEST_LOADING"  # names a file: the script loads for as long as it is there


class Act(IntEnum):
    """What a request's seed makes the script do."""

    ANSWER = 0
    FAIL_AT_ONCE = 1  # an error chunk before any token
    FAIL_LATER = 2  # an error chunk after four tokens
    SLOW = 3  # one step in 20 ms
    SILENT = 4  # nothing for three seconds, as in a long prefill
    DIE = 5  # the engine fails when this request has four tokens
    QUEUE_FULL = 6  # refused with UNAVAILABLE
    PLAY = 7  # answers with `allowed_token_ids` in their order, whose last id ends the answer
    HOLD = 8  # as SLOW, but the last step waits until a request says RELEASE
    RELEASE = 9  # answers, and lets the requests that are held now end


def answer(prompt: Sequence[int], max_tokens: int) -> list[int]:
    """The ids that answer `prompt`."""
    return [int(prompt[i % len(prompt)]) for i in range(max_tokens)]


def logprobs(ids: Sequence[int]) -> tuple[TokenLogprobs, ...]:
    """Each token is the second most probable one; the first is the id after it."""
    return tuple(TokenLogprobs(-1.0 - i / 8, ((i + 1, -0.25), (i, -1.0 - i / 8))) for i in ids)


@dataclass
class _Row:
    request: Request
    ids: list[int]
    act: Act
    ready_at: float
    sent: int = 0
    chunks: int = 0


@dataclass
class ScriptedEngine:
    info: EngineInfo
    stats: EngineStats | None = None  # it has none
    _rows: dict[str, _Row] = field(default_factory=dict)
    _out: deque[Chunk] = field(default_factory=deque)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _dead: bool = False

    @classmethod
    def start(cls, config: EngineConfig, on_progress: Callable[[str], None] | None = None) -> Self:
        model = ModelConfig.from_file(f"{config.checkpoint}/config.json")
        if on_progress is not None:
            on_progress("loading the script")
        loading = Path(os.environ.get(LOADING, "/nowhere"))
        while loading.exists():
            time.sleep(PAUSE)
        info = EngineInfo(
            vocab_size=model.vocab_size,
            max_model_len=config.max_model_len,
            eos_token_ids=(),
            ranks=1,
            engine_pid=0,
            rank_pids=(),
            parameter_bytes=(),
            share_bytes=(),
        )
        engine = cls(info)
        threading.Thread(target=engine._run, daemon=True).start()
        return engine

    def submit(self, request: Request) -> None:
        request = check_request(request, self.info)
        act = Act(request.sampling.seed or 0)
        prompt, limit = request.prompt.tolist(), request.sampling.max_tokens or 0
        delay = 3.0 if act is Act.SILENT else 0.0
        ids = answer(prompt, limit)
        if act is Act.PLAY:
            ids = list(request.sampling.allowed_token_ids or ())
        row = _Row(request, ids, act, time.monotonic() + delay)
        with self._changed:
            if act is Act.RELEASE:
                for held in self._rows.values():
                    held.act = Act.SLOW if held.act is Act.HOLD else held.act
            if act is Act.FAIL_AT_ONCE:
                self._error(row, "the script failed", "INTERNAL")
            elif act is Act.QUEUE_FULL:
                self._error(row, "the queue is full", "UNAVAILABLE")
            else:
                self._rows[request.uid] = row

    def cancel(self, uid: str) -> None:
        with self._changed:
            if row := self._rows.pop(uid, None):
                self._emit(row, [], "abort")

    def cancel_all(self) -> None:
        for uid in list(self._rows):
            self.cancel(uid)

    def receive(self, timeout: float | None = None) -> list[Chunk]:
        with self._changed:
            self._changed.wait_for(lambda: self._out or self._dead, timeout)
            chunks = list(self._out)
            self._out.clear()
            if not chunks and self._dead:
                raise EngineError("rank 0 died (signal 9)")
            return chunks

    def close(self, timeout: float = 8.0) -> None:
        with self._changed:
            self._dead = True
            self._changed.notify_all()

    def _run(self) -> None:
        while not self._dead:
            time.sleep(PAUSE)
            now = time.monotonic()
            with self._changed:
                for row in list(self._rows.values()):
                    if now >= row.ready_at:
                        self._step(row, now)

    def _step(self, row: _Row, now: float) -> None:
        if row.act in (Act.SLOW, Act.HOLD):
            row.ready_at = now + 0.02
        new = row.ids[row.sent : row.sent + 1 + row.chunks % STEP]
        if row.act is Act.HOLD and row.sent + len(new) == len(row.ids):
            return
        row.sent += len(new)
        if row.sent >= 4 and row.act is Act.DIE:
            self._dead = True
            self._changed.notify_all()
        elif row.sent >= 4 and row.act is Act.FAIL_LATER:
            del self._rows[row.request.uid]
            self._error(row, "the script failed", "INTERNAL")
        else:
            done = row.sent == len(row.ids)
            if done:
                del self._rows[row.request.uid]
            reason = "stop" if row.act is Act.PLAY else "length"
            self._emit(row, new, reason if done else None)

    def _error(self, row: _Row, reason: str, code: str) -> None:
        self._emit(row, [], "error", reason, code)

    def _emit(
        self, row: _Row, ids: list[int], finish: str | None, error: str = "", code: str = ""
    ) -> None:
        chunk = Chunk(
            uid=row.request.uid,
            number=row.chunks,
            token_ids=tuple(ids),
            finish_reason=finish,  # type: ignore[arg-type]
            num_prompt_tokens=len(row.request.prompt),
            num_output_tokens=row.sent,
            num_cached_tokens=CACHED,
            logprobs=logprobs(ids) if row.request.sampling.logprobs is not None else (),
            error=error,
            error_code=code,
            stop_token=ids[-1] if finish == "stop" else None,
        )
        row.chunks += 1
        self._out.append(chunk)
        self._changed.notify_all()
