# SPDX-License-Identifier: Apache-2.0
"""What a client may say about sampling: names as vLLM's SamplingParams, checked at the edge.

`SamplingParams.from_mapping` takes a parsed `sampling_parameters` object (or any mapping of
tensor values); every unknown key, wrong type and value out of range is an InvalidInput naming
the field. Settings that other servers know and this engine does not apply are accepted with
the value that means "off" and refused otherwise, so nothing is silently ignored.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from glmserve.errors import InvalidInput

MAX_STOPS: Final = 16
MAX_STOP_TOKENS: Final = 16
MAX_BAD_WORDS: Final = 64
MAX_BAD_WORD_TOKENS: Final = 32
MAX_LOGPROBS: Final = 20
MAX_CHOICES: Final = 16
MAX_BIASES: Final = 1024
SEED_BOUND: Final = 1 << 64

# Known elsewhere, not applied here: accepted with one of these values only.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1, None),
    "beam_width": (1, None),
    "num_return_sequences": (1, None),
    "use_beam_search": (False, None),
    "length_penalty": (1, None),
    "skip_special_tokens": (True, None),
    "spaces_between_special_tokens": (True, None),
    "detokenize": (True, None),
    "truncate_prompt_tokens": (None,),
}


def _number(field: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidInput(field, value, "must be a finite number")
    return float(value)


def _integer(field: str, value: Any) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidInput(field, value, "must be an integer")
    return value


def _flag(field: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidInput(field, value, "must be true or false")
    return value


def _string(field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidInput(field, value, "must be a string")
    return value


def _strings(field: str, value: Any) -> tuple[str, ...]:
    items = (
        (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else None
    )
    if items is None or not all(isinstance(item, str) for item in items):
        raise InvalidInput(field, value, "must be a string or a list of strings")
    return items


def _token_ids(field: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise InvalidInput(field, value, "must be a list of token ids")
    return tuple(_integer(field, item) for item in value)


def _biases(field: str, value: Any) -> tuple[tuple[int, float], ...]:
    """OpenAI's form {"id": bias}, or the canonical list of pairs."""
    if isinstance(value, dict):
        keys = {str(key): bias for key, bias in value.items()}
        if not all(key.isascii() and key.isdigit() for key in keys):
            raise InvalidInput(field, value, "keys must be token ids")
        value = [(int(key), bias) for key, bias in keys.items()]
    if not isinstance(value, list | tuple) or not all(
        isinstance(pair, list | tuple) and len(pair) == 2 for pair in value
    ):
        raise InvalidInput(field, value, "must map token ids to biases")
    return tuple((_integer(field, token), _number(field, bias)) for token, bias in value)


def _token_sequences(field: str, value: Any) -> tuple[tuple[int, ...], ...]:
    if not isinstance(value, list | tuple):
        raise InvalidInput(field, value, "must be a list of lists of token ids")
    return tuple(_token_ids(field, item) for item in value)


def _logprobs(field: str, value: Any) -> int | None:
    """How many alternatives a token; OpenAI's `true` asks for the token's own alone."""
    if isinstance(value, bool):
        return 0 if value else None
    return _integer(field, value)


@dataclass(frozen=True)
class SamplingParams:
    """Settings of one request; construction checks every range (InvalidInput names the field)."""

    max_tokens: int | None = None  # None: up to the context's end
    min_tokens: int = 0  # end-of-answer ids cannot be drawn before
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0  # in (0, 1]
    top_k: int = 0  # 0 = off
    min_p: float = 0.0  # in [0, 1], of the most probable token's probability
    seed: int | None = None  # None: drawn by the engine from the operating system
    n: int = 1  # answers to make of the prompt; choice i has seed + i
    presence_penalty: float = 0.0  # once for each token that the output has
    frequency_penalty: float = 0.0  # for each time that the output has it
    repetition_penalty: float = 1.0  # factor, for tokens of prompt and output
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None  # None = all
    bad_words: tuple[str, ...] = ()  # texts; preprocess turns them into bad_word_ids
    bad_word_ids: tuple[tuple[int, ...], ...] = ()  # sequences that must not be completed
    logprobs: int | None = None  # alternatives reported with each token; None = no logprobs
    prompt_logprobs: int | None = None  # the same for the prompt
    priority: int = 0  # lower runs sooner and is preempted later
    deadline: float | None = None  # seconds from arrival until the request is ended
    grammar: str | None = None  # as llguidance takes it; preprocess makes it from response_format
    grammar_after: int | None = None  # the token that activates it; None = from the start
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()  # applied by postprocess
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        def need(ok: bool, field: str, reason: str) -> None:
            if not ok:
                raise InvalidInput(field, getattr(self, field), reason)

        need(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "must be at least 1")
        need(0.0 <= self.temperature <= 100.0, "temperature", "must be in [0, 100]")
        need(0.0 < self.top_p <= 1.0, "top_p", "must be in (0, 1]")
        need(1 <= self.n <= MAX_CHOICES, "n", f"must be in 1..{MAX_CHOICES}")
        need(self.top_k >= 0, "top_k", "must be 0 (off), -1 (off) or positive")
        need(abs(self.priority) < 1 << 31, "priority", "must fit 32 bits")
        need(self.deadline is None or self.deadline > 0, "deadline", "must be positive seconds")
        need(0.0 <= self.min_p <= 1.0, "min_p", "must be in [0, 1]")
        need(self.grammar != "", "grammar", "must not be empty")
        need(
            self.grammar_after is None or self.grammar_after >= 0,
            "grammar_after",
            "must be a token id",
        )
        need(
            0 <= self.min_tokens <= (self.max_tokens or self.min_tokens),
            "min_tokens",
            f"must be in 0..max_tokens ({self.max_tokens})",
        )
        for penalty in ("presence_penalty", "frequency_penalty"):
            need(-2.0 <= getattr(self, penalty) <= 2.0, penalty, "must be in [-2, 2]")
        need(0.0 < self.repetition_penalty <= 10.0, "repetition_penalty", "must be in (0, 10]")
        need(len(self.logit_bias) <= MAX_BIASES, "logit_bias", f"at most {MAX_BIASES} ids")
        need(
            all(token >= 0 and -100 <= bias <= 100 for token, bias in self.logit_bias),
            "logit_bias",
            "ids must not be negative, biases in [-100, 100]",
        )
        need(self.allowed_token_ids != (), "allowed_token_ids", "must not be empty")
        need(
            all(token >= 0 for token in self.allowed_token_ids or ()),
            "allowed_token_ids",
            "ids must not be negative",
        )
        need(len(self.bad_words) <= MAX_BAD_WORDS, "bad_words", f"at most {MAX_BAD_WORDS}")
        need(all(self.bad_words), "bad_words", "must not be empty strings")
        need(
            len(self.bad_word_ids) <= 4 * MAX_BAD_WORDS and all(self.bad_word_ids),
            "bad_word_ids",
            f"at most {4 * MAX_BAD_WORDS} sequences, none empty",
        )
        need(
            all(len(sequence) <= MAX_BAD_WORD_TOKENS for sequence in self.bad_word_ids),
            "bad_word_ids",
            f"at most {MAX_BAD_WORD_TOKENS} ids a sequence",
        )
        for count in ("logprobs", "prompt_logprobs"):
            value = getattr(self, count)
            need(value is None or 0 <= value <= MAX_LOGPROBS, count, f"in 0..{MAX_LOGPROBS}")
        need(self.seed is None or 0 <= self.seed < SEED_BOUND, "seed", "must be in [0, 2^64)")
        need(len(self.stop) <= MAX_STOPS, "stop", f"at most {MAX_STOPS} strings")
        need(all(self.stop), "stop", "strings must not be empty")
        need(
            len(self.stop_token_ids) <= MAX_STOP_TOKENS,
            "stop_token_ids",
            f"at most {MAX_STOP_TOKENS} ids",
        )
        need(
            all(token >= 0 for token in self.stop_token_ids),
            "stop_token_ids",
            "ids must not be negative",
        )

    @classmethod
    def from_mapping(
        cls, values: Mapping[str, Any], defaults: SamplingParams | None = None
    ) -> SamplingParams:
        """Returns checked settings; keys that are absent or None take `defaults`' values."""
        base = dataclasses.asdict(defaults) if defaults else {}
        for key, value in values.items():
            if key in _NEUTRAL:
                if not any(value == off and type(value) is not str for off in _NEUTRAL[key]):
                    raise InvalidInput(key, value, "this setting is not supported")
            elif key == "top_logprobs":
                continue
            elif key not in _CONVERT:
                raise InvalidInput(key, value, "unknown sampling parameter")
            elif value is not None:
                base[key] = _CONVERT[key](key, value)
        alternatives = values.get("top_logprobs")  # OpenAI's chat form: logprobs true, and a count
        if alternatives is not None and values.get("logprobs") is True:
            base["logprobs"] = _integer("top_logprobs", alternatives)
        elif alternatives:
            raise InvalidInput("top_logprobs", alternatives, "needs logprobs true")
        if base.get("top_k") == -1:  # vLLM's other spelling of "off"
            base["top_k"] = 0
        return cls(**base)

    @classmethod
    def parse_object(cls, text: str, field: str = "sampling_parameters") -> dict[str, Any]:
        """Parses the JSON object of `field`; InvalidInput when it is not one."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidInput(field, text, f"is not valid JSON: {error}") from None
        if not isinstance(value, dict):
            raise InvalidInput(field, text, "must be a JSON object")
        return value

    def to_json(self) -> str:
        """The canonical JSON form; `from_mapping(parse_object(...))` gives the same settings."""
        return json.dumps(dataclasses.asdict(self))


_CONVERT: Mapping[str, Any] = {
    "max_tokens": _integer,
    "n": _integer,
    "temperature": _number,
    "top_p": _number,
    "top_k": _integer,
    "min_p": _number,
    "priority": _integer,
    "deadline": _number,
    "grammar": _string,
    "grammar_after": _integer,
    "min_tokens": _integer,
    "presence_penalty": _number,
    "frequency_penalty": _number,
    "repetition_penalty": _number,
    "logit_bias": _biases,
    "allowed_token_ids": _token_ids,
    "bad_words": _strings,
    "bad_word_ids": _token_sequences,
    "logprobs": _logprobs,
    "prompt_logprobs": _logprobs,
    "seed": _integer,
    "ignore_eos": _flag,
    "stop": _strings,
    "stop_token_ids": _token_ids,
    "include_stop_str_in_output": _flag,
}
assert set(_CONVERT) == {f.name for f in dataclasses.fields(SamplingParams)}
