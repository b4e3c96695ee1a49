# SPDX-License-Identifier: Apache-2.0
"""Token ids of conversations with a weight for each, and rows packed from them.

Also makes the checkpoint's tokenizer from the generator's own text.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from glmserve.text import markers
from glmserve.text.synthetic_tokenizer import TokenizerInfo, write_tokenizer
from tools.tiny import corpus
from tools.tiny.conversation import Conversation, full_text

PROMPT_WEIGHT = 0.03  # of the loss at tokens that the model does not write itself
TOKENIZER_TEXTS = 8000
TEMPLATE = Path(__file__).with_name("chat_template.jinja")

Array = npt.NDArray[Any]


def make_tokenizer(directory: Path, vocab_size: int, texts: int = TOKENIZER_TEXTS) -> TokenizerInfo:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja; always the same bytes."""
    conversations = itertools.islice(corpus.training(seed=0, longest=300), texts)
    marker = re.compile("|".join(re.escape(name) for name, _ in markers.ADDED_TOKENS))
    parts = [part for c in conversations for part in marker.split(full_text(c)) if part]
    info = write_tokenizer(directory, vocab_size, texts=parts)
    (directory / TEMPLATE.name).write_bytes(TEMPLATE.read_bytes())
    return info


@dataclass(frozen=True)
class Encoder:
    """Tokenizer of a checkpoint with the ids that steer the loss."""

    tokenizer: Tokenizer
    assistant: int
    think: int
    think_end: int
    ends: tuple[int, ...]

    @classmethod
    def of(cls, directory: Path) -> Encoder:
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))

        def ident(name: str) -> int:
            found = tokenizer.token_to_id(name)
            assert found is not None, name
            return int(found)

        return cls(
            tokenizer,
            ident(markers.ASSISTANT),
            ident(markers.THINK),
            ident(markers.THINK_END),
            tuple(ident(name) for name in (markers.USER, markers.OBSERVATION)),
        )

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def training_ids(self, conversation: Conversation) -> tuple[Array, Array]:
        """Ids [n] int64 and the loss weight of predicting each of them [n] float32."""
        ids = np.array(self.encode(full_text(conversation)), dtype=np.int64)
        weights = np.full(len(ids), PROMPT_WEIGHT, dtype=np.float32)
        ends = np.flatnonzero(np.isin(ids, self.ends))
        turns = np.flatnonzero(ids == self.assistant)
        for start, trained in zip(turns, conversation.trained, strict=True):
            first = start + 2  # after <|assistant|><think>
            weights[start + 1] = 0.0
            if ids[first] == self.think_end:  # given by the prompt
                weights[first] = 0.0
                first += 1
            last = ends[np.searchsorted(ends, first)]
            weights[first : last + 1] = 1.0 if trained else 0.0
        return ids, weights


@dataclass
class Rows:
    """Packed rows [n, T]: ids, position and number of each token's conversation, weights."""

    ids: Array
    positions: Array
    documents: Array
    weights: Array


def rows(encoder: Encoder, seed: int, width: int, count: int, longest: int) -> Iterator[Rows]:
    """Endless batches of `count` rows; a conversation is never cut, what is left is padding.

    Padding is a document of its own, without weight.
    """
    conversations = corpus.training(seed, longest)
    waiting: list[tuple[Array, Array]] = []
    while True:
        out = Rows(
            np.zeros((count, width), dtype=np.int16),
            np.tile(np.arange(width, dtype=np.int16), (count, 1)),
            np.zeros((count, width), dtype=np.int16),
            np.zeros((count, width), dtype=np.float16),
        )
        for row in range(count):
            used = number = 0
            while used < width:
                while len(waiting) < 24:
                    ids, weights = encoder.training_ids(next(conversations))
                    if len(ids) <= width:
                        waiting.append((ids, weights))
                fitting = (i for i, (ids, _) in enumerate(waiting) if len(ids) <= width - used)
                chosen = next(fitting, None)
                if chosen is None:
                    break
                ids, weights = waiting.pop(chosen)
                place = slice(used, used + len(ids))
                out.ids[row, place], out.weights[row, place] = ids, weights
                out.weights[row, used] = 0.0  # nothing predicts the first token
                out.positions[row, place] = np.arange(len(ids))
                number += 1
                out.documents[row, place] = number
                used += len(ids)
        yield out
