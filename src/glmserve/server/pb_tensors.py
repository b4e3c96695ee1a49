# SPDX-License-Identifier: Apache-2.0
"""Converts between the server's request objects and plain values, driven by the tensor table.

Imported by the `model.py` files only: `triton_python_backend_utils` exists in the server's stub
processes and nowhere else.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import triton_python_backend_utils as pb

from glmserve.errors import GlmServeError, InvalidInput
from glmserve.server.tensors import Tensor

_NUMPY: Mapping[str, Any] = {
    "STRING": np.object_,
    "BOOL": np.bool_,
    "INT32": np.int32,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "FP32": np.float32,
}


def read_inputs(request: Any, table: Iterable[Tensor]) -> dict[str, Any]:
    """Returns the tensors that the request has, by name.

    dims [1] give a str, bool, int or float; dims [-1] give a list of str or the numpy array.
    Raises InvalidInput naming the tensor that has a wrong size or is not UTF-8.
    """
    values: dict[str, Any] = {}
    for tensor in table:
        given = pb.get_input_tensor_by_name(request, tensor.name)
        if given is None:
            continue
        array = given.as_numpy().reshape(-1)
        if tensor.dims == (1,):
            if array.size != 1:
                raise InvalidInput(tensor.name, list(array.shape), "must have one element")
            values[tensor.name] = _scalar(tensor, array[0])
        elif tensor.dtype == "STRING":
            values[tensor.name] = [_text(tensor, item) for item in array]
        else:
            values[tensor.name] = array
    return values


def read_parameters(request: Any) -> dict[str, Any]:
    """Returns the request parameters of the protocol (scalars by name)."""
    parameters = json.loads(request.parameters() or "{}")
    assert isinstance(parameters, dict), parameters
    return parameters


def make_outputs(table: Iterable[Tensor], values: Mapping[str, Any]) -> list[Any]:
    """Makes the output tensors from single values, lists or arrays; None is left out."""
    outputs = []
    for tensor in table:
        value = values[tensor.name]
        if value is None:
            continue
        items = value if isinstance(value, list | np.ndarray) else [value]
        if tensor.dtype == "STRING":
            items = [item.encode() for item in items]
        array = np.asarray(items, dtype=_NUMPY[tensor.dtype])
        outputs.append(pb.Tensor(tensor.name, array))
    return outputs


def make_error(stage: str, error: GlmServeError) -> Any:
    """An error response; its text starts with the stage, which the server does not name."""
    code = getattr(pb.TritonError, error.code, pb.TritonError.INTERNAL)
    return pb.InferenceResponse(error=pb.TritonError(f"{stage}: {error}", code))


def _scalar(tensor: Tensor, item: Any) -> Any:
    if tensor.dtype == "STRING":
        return _text(tensor, item)
    if tensor.dtype == "FP32":  # 0.7 stays 0.7: the same setting as in JSON
        return float(str(item))
    return item.item()


def _text(tensor: Tensor, item: Any) -> str:
    try:
        return bytes(item).decode()
    except UnicodeDecodeError as error:
        raise InvalidInput(tensor.name, bytes(item[:20]), f"is not UTF-8: {error.reason}") from None
