# SPDX-License-Identifier: Apache-2.0
"""postprocess: new token ids in, text out, one response each. Only tensors are handled here.

One instance, so that the order of a request's responses is kept. Threads: the execute thread only.
"""

from __future__ import annotations

import os
from typing import Any

import triton_python_backend_utils as pb

from glmserve.server import choices, pb_tensors, relay, settings
from glmserve.server.postprocess_stage import PostprocessStage
from glmserve.server.tensors import MODELS
from glmserve.text.tokenizer import Tokenizer

_TENSORS = MODELS["postprocess"]


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        settings.apply_parameters(args["model_config"])
        client = relay.RelayClient(relay.runtime_dir(os.getppid()))
        self.stage = PostprocessStage(Tokenizer(settings.engine_config().checkpoint), client)

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._respond(request) for request in requests]

    def _respond(self, request: Any) -> Any:
        tensors = pb_tensors.read_inputs(request, _TENSORS.inputs)
        answers = [
            self.stage.handle(tokens, request.is_cancelled)
            for tokens in choices.split_tokens(_TENSORS.inputs, tensors)
        ]
        values = choices.join(_TENSORS.outputs, answers)
        return pb.InferenceResponse(pb_tensors.make_outputs(_TENSORS.outputs, values))

    def finalize(self) -> None:
        self.stage.close()
