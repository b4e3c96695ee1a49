# SPDX-License-Identifier: Apache-2.0
"""preprocess: chat or text in, token ids and checked settings out. Only tensors are handled here.

Threads: the server's execute thread (one an instance), and the template worker's process.
"""

from __future__ import annotations

from typing import Any

import triton_python_backend_utils as pb

from glmserve.errors import GlmServeError
from glmserve.server import pb_tensors, settings
from glmserve.server.preprocess_stage import PreprocessStage
from glmserve.server.stage_messages import TextRequest
from glmserve.server.tensors import MODELS

_TENSORS = MODELS["preprocess"]


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        settings.apply_parameters(args["model_config"])
        self.stage = PreprocessStage(settings.engine_config())

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._respond(request) for request in requests]

    def _respond(self, request: Any) -> Any:
        try:
            tensors = pb_tensors.read_inputs(request, _TENSORS.inputs)
            parameters = pb_tensors.read_parameters(request)
            prompted = self.stage.handle(TextRequest(tensors, parameters))
        except GlmServeError as error:
            return pb_tensors.make_error("preprocess", error)
        return pb.InferenceResponse(pb_tensors.make_outputs(_TENSORS.outputs, vars(prompted)))

    def finalize(self) -> None:
        self.stage.close()
