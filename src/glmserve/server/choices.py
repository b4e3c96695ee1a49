# SPDX-License-Identifier: Apache-2.0
"""Several choices of one request in one response: a row of values for each tensor.

A tensor of shape [-1] has one element a choice, in the order of `sequence_index`; one of shape [1]
is the request's. `output_ids` holds the choices' tokens one after the other, `num_output_tokens` of
them each. A stream's responses have one choice, the one response of a request without `stream` has
all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from glmserve.server.stage_messages import TextResponse, TokensResponse
from glmserve.server.tensors import Tensor


def join(
    table: Iterable[Tensor], responses: Sequence[TokensResponse] | Sequence[TextResponse]
) -> dict[str, Any]:
    """The values of one response by tensor name; what the request has once is the first's."""
    first = vars(responses[0])
    values: dict[str, Any] = {}
    for tensor in table:
        name = tensor.name
        if name == "output_ids":
            values[name] = np.concatenate([vars(response)[name] for response in responses])
        elif tensor.dims == (1,) or first[name] is None:
            values[name] = first[name]
        else:
            values[name] = [vars(response)[name] for response in responses]
    return values


def split_tokens(table: Iterable[Tensor], values: Mapping[str, Any]) -> list[TokensResponse]:
    """The inverse of `join` for glm_dsa's responses, from what `read_inputs` gives."""
    ends = np.cumsum(values["num_output_tokens"]).tolist()
    starts = [0, *ends[:-1]]
    each = [t.name for t in table if t.dims == (-1,) and t.name in values]
    responses = []
    for choice, (start, end) in enumerate(zip(starts, ends, strict=True)):
        own = {name: values[name][choice] for name in each if name != "output_ids"}
        own = {name: v.item() if isinstance(v, np.generic) else v for name, v in own.items()}
        own["output_ids"] = values["output_ids"][start:end]
        responses.append(TokensResponse(**{**values, **own}))
    return responses
