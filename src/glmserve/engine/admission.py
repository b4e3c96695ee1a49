# SPDX-License-Identifier: Apache-2.0
"""The checks that a request must pass before anything is allocated for it.

They run in the client's process (the server's stage or a command), so that bad input is answered
at once and never reaches the engine.
"""

from __future__ import annotations

import dataclasses

from glmserve.errors import InvalidInput
from glmserve.messages import EngineInfo, Request


def check_request(request: Request, info: EngineInfo) -> Request:
    """Returns the request with `max_tokens` filled in; raises InvalidInput naming the field."""
    prompt, sampling = request.prompt, request.sampling
    if prompt.ndim != 1 or len(prompt) == 0:
        raise InvalidInput("input_ids", list(prompt.shape), "the prompt is empty")
    low, high = int(prompt.min()), int(prompt.max())
    if low < 0 or high >= info.vocab_size:
        bad = low if low < 0 else high
        raise InvalidInput("input_ids", bad, f"token ids must be in [0, {info.vocab_size})")
    check_length(len(prompt), info.max_model_len)
    room = info.max_model_len - len(prompt)
    if sampling.max_tokens is not None and sampling.max_tokens > room:
        raise InvalidInput(
            "max_tokens",
            sampling.max_tokens,
            f"prompt ({len(prompt)} tokens) and output must fit the context of"
            f" {info.max_model_len} tokens: at most {room}",
        )
    named = {
        "stop_token_ids": sampling.stop_token_ids,
        "allowed_token_ids": sampling.allowed_token_ids or (),
        "logit_bias": [token for token, _ in sampling.logit_bias],
        "bad_word_ids": [token for sequence in sampling.bad_word_ids for token in sequence],
    }
    for field, tokens in named.items():
        for token in tokens:
            if not 0 <= token < info.vocab_size:
                raise InvalidInput(field, token, f"ids must be in [0, {info.vocab_size})")
    if sampling.bad_words:
        raise InvalidInput("bad_words", list(sampling.bad_words), "must come as bad_word_ids here")
    if sampling.n != 1:
        raise InvalidInput("n", sampling.n, "each choice must be a request of its own here")
    filled = dataclasses.replace(sampling, max_tokens=sampling.max_tokens or room)
    return dataclasses.replace(request, sampling=filled)


def check_length(tokens: int, max_model_len: int) -> None:
    """Raises InvalidInput when a prompt leaves no room for one output token."""
    if tokens >= max_model_len:
        raise InvalidInput(
            "prompt",
            tokens,
            f"the prompt has {tokens} tokens, the context holds {max_model_len}"
            " (at least one is needed for the output)",
        )
