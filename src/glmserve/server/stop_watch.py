# SPDX-License-Identifier: Apache-2.0
"""Finds stop strings while the answer of a non-streaming request is still being made.

postprocess gets such an answer in one piece at its end: without this the engine would go on past
a stop string up to max_tokens. It only says when; the cut itself is made by postprocess.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from glmserve.server.output_settings import OutputSettings
from glmserve.text.output import OutputProcessor
from glmserve.text.tokenizer import Tokenizer


class StopWatches:
    """Makes one watch a request; loads the tokenizer once."""

    def __init__(self, checkpoint: str) -> None:
        self._tokenizer = Tokenizer(checkpoint)

    def __call__(self, output_settings: str) -> Callable[[Sequence[int]], bool]:
        options = OutputSettings.from_json(output_settings).options
        processor = OutputProcessor(self._tokenizer, options)
        return lambda ids: processor.push(ids).stopped
