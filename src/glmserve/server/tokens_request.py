# SPDX-License-Identifier: Apache-2.0
"""Reads a request of the glm_dsa model, which preprocess or a direct caller has made.

Ranges that depend on the engine (token ids, room in the context) are checked on submission.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from glmserve.errors import InvalidInput
from glmserve.messages import Request
from glmserve.sampling_params import SamplingParams
from glmserve.server.stage_messages import StopRequest, TokensRequest


def parse_tokens_request(
    tensors: Mapping[str, Any], defaults: SamplingParams
) -> TokensRequest | StopRequest:
    """Makes a request from tensor values by name; raises InvalidInput naming the field."""
    if tensors.get("stop"):
        if not tensors.get("request_uid"):
            raise InvalidInput("request_uid", None, "`stop` needs the uid of the request to end")
        return StopRequest(tensors["request_uid"])
    if "input_ids" not in tensors:
        raise InvalidInput("input_ids", None, "the prompt's token ids are missing")
    given = SamplingParams.parse_object(tensors.get("sampling_parameters") or "{}")
    sampling = SamplingParams.from_mapping(given, defaults)
    settings = tensors.get("output_settings")
    if sampling.stop and settings is None:
        raise InvalidInput("stop", list(sampling.stop), "stop strings need the ensemble")
    uid = tensors.get("request_uid") or secrets.token_hex(16)
    return TokensRequest(
        Request(uid, tensors["input_ids"].copy(), sampling), tensors.get("stream", False), settings
    )
