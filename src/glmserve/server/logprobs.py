# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities on their way out: compact from glm_dsa, as the vLLM backend's to clients.

A client gets one object a token, keyed by token id: the token itself first, then the alternatives,
each with `logprob`, `rank` (1 = most probable, null = not among the alternatives), `decoded_token`
and `bytes`, which a part of a character needs. Which tokens count is postprocess's decision.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from glmserve.messages import TokenLogprobs
from glmserve.text.tokenizer import Tokenizer

_LOWEST: Final = -9999.0  # stands for a probability of zero, which JSON cannot say


def encode_logprobs(ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> str:
    """JSON list of [id, logprob, [[id, logprob], ...]], one item a token."""
    return json.dumps([[i, e.logprob, e.top] for i, e in zip(ids, entries, strict=True)])


class LogprobFormat:
    """Writes the clients' form; knows how tokens are spelled."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._entries = tokenizer.entries
        self._added = {token: literal for literal, token in tokenizer.added_tokens.items()}

    def write(self, compact: str, count: int | None = None) -> tuple[str, float]:
        """The JSON of the first `count` (None: all) tokens of `encode_logprobs`, and their sum."""
        tokens = json.loads(compact)[:count]
        total = sum(max(logprob, _LOWEST) for _, logprob, _ in tokens)
        return json.dumps([self._token(*token) for token in tokens], ensure_ascii=False), total

    def _token(self, token: int, logprob: float, top: list[tuple[int, float]]) -> dict[str, Any]:
        ranks = {other: rank for rank, (other, _) in enumerate(top, start=1)}
        values = {token: logprob} | dict(top)
        return {
            str(key): {"logprob": max(value, _LOWEST), "rank": ranks.get(key), **self._spell(key)}
            for key, value in values.items()
        }

    def _spell(self, token: int) -> dict[str, Any]:
        entry = self._added.get(token) or self._entries[token]
        raw = entry.encode() if isinstance(entry, str) else entry or b""
        return {"decoded_token": raw.decode("utf-8", "replace"), "bytes": list(raw)}
