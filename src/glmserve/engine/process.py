# SPDX-License-Identifier: Apache-2.0
"""The engine process: `python -m glmserve.engine.process SPEC`, started by `engine.client`.

It starts the ranks, tells the client when they have loaded, and runs the loop until the client
goes away or a rank dies. Python and numpy only: neither torch nor CUDA is touched here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import select
import sys
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path

from glmserve.checkpoint.declared import open_source
from glmserve.checkpoint.memory_plan import with_planned_pages
from glmserve.config import EngineConfig
from glmserve.engine.client import EngineSpec
from glmserve.engine.gpu_memory import gpu_memory
from glmserve.engine.grammar_state import Grammars
from glmserve.engine.loop import EngineLoop
from glmserve.engine.scheduler import Scheduler
from glmserve.errors import ConfigError, EngineError, GlmServeError
from glmserve.generation_config import GenerationConfig
from glmserve.ipc.process import watch_heartbeat
from glmserve.messages import (
    Cancel,
    EngineFailed,
    EngineInfo,
    Progress,
    RanksReady,
    Request,
    Update,
    decode,
    encode,
)
from glmserve.model_config import ModelConfig
from glmserve.parallel.launcher import RING_BYTES, RankLauncher
from glmserve.text.grammar_vocabulary import grammar_vocabulary
from glmserve.text.tokenizer import Tokenizer

STATS_PERIOD = 0.5  # seconds between two messages of statistics while steps run
LOAD_TIMEOUT = 3600.0  # seconds; 95 GB a rank from slow storage is minutes
_RESULT_BYTES = 512  # of a result, a token row: one with 20 log-probabilities takes 321


def resolve(config: EngineConfig) -> tuple[EngineConfig, ModelConfig]:
    """Checks the settings against the checkpoint and fills in what follows from it."""
    directory = Path(config.checkpoint)
    model = ModelConfig.from_file(directory / "config.json")
    model.check_ranks(config.ranks, config.expert_layout)
    if config.device == "cuda":
        config = _planned(config)
    config = config.with_limits(model.max_position_embeddings)
    if config.share_draft_index is None:
        share = model.index_share_for_mtp_iteration
        config = dataclasses.replace(config, share_draft_index=share)
    if not config.valid_tokens and (directory / "tokenizer.json").exists():
        valid = min(Tokenizer(directory).vocab_size, model.vocab_size)
        config = dataclasses.replace(config, valid_tokens=valid)
    return config, model


def _planned(config: EngineConfig) -> EngineConfig:
    """Settings with the pages that fit. Pages that were asked for are taken on trust where nobody
    knows the GPU's memory."""
    try:
        memory = gpu_memory(config)
    except ConfigError:
        if config.num_pages:
            return config
        raise
    source = open_source(config.checkpoint, files=not config.synthetic)
    return with_planned_pages(config, source, memory)


class EngineProcess:
    """Glue between the client's connection, the loop and the ranks."""

    def __init__(self, config: EngineConfig, connection: Connection) -> None:
        self.config, self.model = resolve(config)
        self.connection = connection
        # While nothing runs, a rank that dies or a grammar that is built must end the wait.
        self.wake_read, self.wake_write = os.pipe()
        os.set_blocking(self.wake_write, False)
        drawn = self.config.chunk + self.config.max_rows * (self.config.drafts + 1)
        self.ranks = RankLauncher(
            self.config,
            result_bytes=max(RING_BYTES, _RESULT_BYTES * drawn),
            on_failure=lambda _reason: self._wake(),
        )
        self.scheduler: Scheduler | None = None

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: nobody has slept for long
            os.write(self.wake_write, b"x")

    def _wait(self) -> None:
        """Sleeps until there may be something to do; raises EngineError when a rank has died."""
        if self.wake_read in wait([self.connection, self.wake_read]):
            os.read(self.wake_read, 4096)
        self.ranks.check()

    def load(self) -> EngineInfo:
        """Waits until every rank is ready, passing their progress lines on."""
        try:
            while isinstance(message := decode(self.ranks.recv(LOAD_TIMEOUT)), Progress):
                self.connection.send(message)
        except EngineError as error:  # nobody is served yet: the rank's own words may be told
            raise EngineError(f"{error}\n{self.ranks.failure_detail}") from None
        assert isinstance(message, RanksReady), message
        generation = GenerationConfig.from_directory(self.config.checkpoint)
        eos = generation.eos_token_ids or self.model.eos_token_id
        grammars = Grammars(
            lambda: grammar_vocabulary(Tokenizer(self.config.checkpoint), eos),
            self.model.vocab_size,
            on_built=self._wake,
        )
        self.scheduler = Scheduler(self.config, eos, grammars)
        return EngineInfo(
            vocab_size=self.model.vocab_size,
            max_model_len=self.config.max_model_len,
            eos_token_ids=eos,
            ranks=self.config.ranks,
            engine_pid=os.getpid(),
            rank_pids=self.ranks.pids,
            parameter_bytes=message.parameter_bytes,
            share_bytes=message.share_bytes,
        )

    def serve(self) -> None:
        """Runs until the client closes its end; raises EngineError when the ranks fail."""
        assert self.scheduler is not None
        loop = EngineLoop(
            self.scheduler,
            self.ranks,
            # As Connection.send, whose own pickler is made anew for each message.
            lambda update: self.connection.send_bytes(encode(update)),
        )
        inbox = select.poll()  # Connection.poll makes a selector each time
        inbox.register(self.connection, select.POLLIN)
        busy, next_stats = True, 0.0
        gc.freeze()  # what has been loaded stays: the collector need not walk it again
        while True:
            if not busy:
                self._wait()
            messages: list[Request | Cancel] = []
            try:
                while inbox.poll(0):
                    messages.append(self.connection.recv())
            except (EOFError, ConnectionError):
                return
            loop.take(messages)
            busy = loop.step()
            now = time.monotonic()
            if not busy or now >= next_stats:
                self.connection.send(self.scheduler.snapshot())
                next_stats = now + STATS_PERIOD

    def fail_running(self, reason: str) -> None:
        """Answers every request with an error; nothing that was accepted stays without an end."""
        if self.scheduler is None:
            return
        ended = [
            end._replace(reason="error", error=reason, error_code="INTERNAL")
            for end in self.scheduler.cancel(None)
        ]
        self.connection.send(Update(ended=tuple(ended)))


def main() -> int:
    spec = EngineSpec(**json.loads(sys.argv[1]))
    watch_heartbeat(spec.heartbeat)
    connection = Connection(spec.socket)
    process: EngineProcess | None = None
    try:
        process = EngineProcess(EngineConfig.from_json(spec.engine), connection)
        connection.send(process.load())
        process.serve()
        return 0
    except (BrokenPipeError, ConnectionResetError):
        return 0  # the client has gone
    except (GlmServeError, TimeoutError, OSError) as error:
        reason = str(error) or type(error).__name__
        if process is not None:
            process.fail_running(reason)
        connection.send(EngineFailed(reason))
        return 1
    finally:
        if process is not None:
            process.ranks.close()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (BrokenPipeError, EngineError):
        sys.exit(1)
