# SPDX-License-Identifier: Apache-2.0
"""Dataclasses that the stages exchange through the server's tensors (see `tensors.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from glmserve.messages import IntArray, Request


@dataclass(frozen=True)
class TextRequest:
    """What a client sent to the ensemble: tensors by name (absent = not given), and parameters."""

    tensors: Mapping[str, Any]
    parameters: Mapping[str, Any]  # request parameters of the protocol, lowest precedence


@dataclass(frozen=True)
class Prompted:
    """What preprocess makes of it for glm_dsa; field names are tensor names."""

    input_ids: IntArray  # [tokens] int32
    sampling_parameters: str  # canonical JSON of SamplingParams
    stream: bool
    request_uid: str
    output_settings: str  # JSON of OutputSettings


@dataclass(frozen=True)
class TokensRequest:
    """A parsed request of the glm_dsa model."""

    request: Request
    stream: bool
    output_settings: str | None  # given by preprocess: the answer goes through postprocess


@dataclass(frozen=True)
class StopRequest:
    """A request of the glm_dsa model that ends another one."""

    uid: str


@dataclass(frozen=True)
class TokensResponse:
    """New tokens of one choice, as glm_dsa sends them; field names are tensor names."""

    output_ids: IntArray  # [new tokens] int32
    finish_reason: str  # "" until the last one
    stop_token: int  # -1 = none
    num_input_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    request_uid: str
    index: int  # of this choice's responses
    sequence_index: int  # the choice
    error_message: str
    output_settings: str | None = None  # in the first response only
    logprobs: str | None = None  # JSON (`logprobs.encode_logprobs`), when asked for
    prompt_logprobs: str | None = None


@dataclass(frozen=True)
class TextResponse:
    """What is new of one choice, as clients get it; field names are tensor names."""

    text_output: str
    reasoning_content: str
    tool_calls: str  # JSON list of deltas
    finish_reason: str
    stop_reason: str  # JSON: a string, a number or null
    cumulative_logprob: float
    logprobs: str  # JSON list, or null
    prompt_logprobs: str  # JSON list, or null
    num_input_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_reasoning_tokens: int
    request_uid: str
    index: int  # of this choice's responses
    sequence_index: int  # the choice
    error_message: str
