# SPDX-License-Identifier: Apache-2.0
"""glm_dsa: token ids in, new token ids out, decoupled. Only tensors are handled here.

Threads of this stub process, which never touches a GPU:
  execute    the server's; parses requests and queues them, never waits for an answer
  sender     owns the running requests, sends every response, polls for cancelled clients
  receiver   takes chunks from the engine and queues them for the sender
  engine-*   the engine client's: reads the engine's connection, watches its process
  metrics    publishes what was counted, twice a second; all its calls go to the server
  relay      serves the socket through which postprocess and the launcher speak to this stage
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import triton_python_backend_utils as pb

from glmserve import env
from glmserve.errors import GlmServeError
from glmserve.generation_config import GenerationConfig
from glmserve.server import pb_tensors, relay, settings
from glmserve.server.choices import join
from glmserve.server.engine_source import engine_starter
from glmserve.server.glm_stage import GlmStage
from glmserve.server.metrics import Metrics
from glmserve.server.stage_messages import StopRequest, TokensResponse
from glmserve.server.stop_watch import StopWatches
from glmserve.server.tensors import MODELS
from glmserve.server.tokens_request import parse_tokens_request

_TENSORS = MODELS["glm_dsa"]
_FINAL = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class _Responder:
    """The server's response sender of one request, as the stage sees it."""

    def __init__(self, sender: Any) -> None:
        self._sender = sender

    def send(self, choices: Sequence[TokensResponse], final: bool) -> None:
        outputs = pb_tensors.make_outputs(_TENSORS.outputs, join(_TENSORS.outputs, choices))
        self._sender.send(pb.InferenceResponse(outputs), flags=_FINAL if final else 0)

    def fail(self, error: GlmServeError) -> None:
        self._sender.send(pb_tensors.make_error("glm_dsa", error), flags=_FINAL)

    def finish(self) -> None:
        self._sender.send(flags=_FINAL)

    def is_cancelled(self) -> bool:
        return bool(self._sender.is_cancelled())


def _make_family(kind: str, name: str, doc: str) -> Any:
    return pb.MetricFamily(name=name, description=doc, kind=getattr(pb.MetricFamily, kind))


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        settings.apply_parameters(args["model_config"])
        config = settings.engine_config()
        self.defaults = GenerationConfig.from_directory(config.checkpoint).sampling
        self.stage = GlmStage(
            engine_starter(env.ENGINE.get()),
            config,
            relay.runtime_dir(os.getppid()),
            keep_alive=env.KEEP_ALIVE.get(),
            watch_stops=StopWatches(config.checkpoint),
        )
        labels = {"model": args["model_name"], "version": args["model_version"]}
        stage = self.stage
        self.metrics = Metrics(_make_family, labels, stage.observations, stage.engine_stats)

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            responder = _Responder(request.get_response_sender())
            try:
                tensors = pb_tensors.read_inputs(request, _TENSORS.inputs)
                parsed = parse_tokens_request(tensors, self.defaults)
            except GlmServeError as error:
                self.stage.refuse(error, responder)
            else:
                if isinstance(parsed, StopRequest):
                    self.stage.cancel(parsed, responder)
                else:
                    self.stage.submit(parsed, responder)

    def finalize(self) -> None:
        self.metrics.close()
        self.stage.close()
