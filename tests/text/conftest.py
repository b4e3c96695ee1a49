# SPDX-License-Identifier: Apache-2.0
"""One synthetic tokenizer for the tests of this room."""

from __future__ import annotations

from pathlib import Path

import pytest

from glmserve.text.synthetic_tokenizer import write_tokenizer
from glmserve.text.tokenizer import Tokenizer

HEAD_ROWS = 512


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    write_tokenizer(directory, HEAD_ROWS, seed=0)
    return directory


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer(checkpoint)
