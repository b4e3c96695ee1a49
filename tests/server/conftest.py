# SPDX-License-Identifier: Apache-2.0
"""One small checkpoint, and one server a kind, for the whole session."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from glmserve import env
from glmserve.text.tokenizer import Tokenizer
from tests.server.harness import SCRIPTED, Server


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random checkpoint of the tiny preset."""
    directory = tmp_path_factory.mktemp("checkpoint") / "tiny"
    command = [sys.executable, "-m", "glmserve.cli", "make-checkpoint", str(directory)]
    subprocess.run([*command, "--preset", "tiny"], env=env.child_environment(), check=True)
    return directory


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer(checkpoint)


@pytest.fixture(scope="session")
def drafting(checkpoint: Path) -> Iterator[Server]:
    """A server with the real engine on one rank and two drafts a step."""
    options = ["--checkpoint", str(checkpoint), "--ranks", "1", "--device", "cpu"]
    with Server(*options, GLMSERVE_DRAFTS="2") as server:
        yield server


@pytest.fixture(scope="session")
def scripted(checkpoint: Path) -> Iterator[Server]:
    """A server whose tokens come from a script (`scripted_engine.py`)."""
    with Server(
        "--checkpoint", str(checkpoint), GLMSERVE_ENGINE=SCRIPTED, GLMSERVE_KEEP_ALIVE="0.5"
    ) as server:
        yield server
