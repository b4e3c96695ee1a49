# SPDX-License-Identifier: Apache-2.0
"""What the preprocess model does: a client's request becomes token ids and checked settings.

Everything a client can get wrong is refused here, naming the field, before glm_dsa hears of it
(ranges that need the engine, such as max_tokens against the room left, are refused by glm_dsa as
early). Not its job: how a prompt is rendered or tokenized (`text`), tensors (`model.py`).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from glmserve import env
from glmserve.config import EngineConfig
from glmserve.engine.admission import check_length
from glmserve.errors import InvalidInput
from glmserve.generation_config import GenerationConfig
from glmserve.sampling_params import SamplingParams
from glmserve.server.output_settings import OutputSettings
from glmserve.server.stage_messages import Prompted, TextRequest
from glmserve.text.chat_request import CHAT_INPUTS, ChatRequest
from glmserve.text.grammar import GrammarBuilder
from glmserve.text.output_constraint import OutputConstraint, take_constraint
from glmserve.text.output_options import StopOptions
from glmserve.text.prompt import Prompt, PromptBuilder

# Tensors that are sampling settings, and the setting that each one stands for.
_SETTINGS: Final[Mapping[str, str]] = {
    "max_tokens": "max_tokens",
    "min_tokens": "min_tokens",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "seed": "seed",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "length_penalty": "length_penalty",
    "beam_width": "beam_width",
    "num_return_sequences": "n",
    "stop_words": "stop",
    "bad_words": "bad_words",
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
    "priority": "priority",
    "deadline": "deadline",
    "response_format": "response_format",
    "guided_decoding_guide_type": "guided_decoding_guide_type",
    "guided_decoding_guide": "guided_decoding_guide",
}
# Request parameters that the protocol itself puts there; any other one is a sampling setting.
_PROTOCOL: Final = frozenset(
    {"id", "sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers"}
    | {"binary_data_output", "triton_enable_empty_final_response", "triton_final_response"}
)


class PreprocessStage:
    """Turns requests into prompts; one object an instance of the model."""

    def __init__(self, config: EngineConfig) -> None:
        """`config` has its `max_model_len` filled in. Raises CheckpointError, ConfigError."""
        self._max_model_len = config.max_model_len
        self._stop_scope = env.STOP_SCOPE.get()
        self._builder = PromptBuilder(
            config.checkpoint,
            plain_user_text=env.PLAIN_USER_TEXT.get(),
            unknown_tool=env.UNKNOWN_TOOL.get(),
            defaults=env.CHAT_TEMPLATE_KWARGS.get(),
        )
        self._grammars = GrammarBuilder(self._builder.tokenizer)
        self._defaults = GenerationConfig.from_directory(config.checkpoint).sampling

    def close(self) -> None:
        self._builder.close()

    def handle(self, request: TextRequest) -> Prompted:
        """Raises InvalidInput naming the field; the uid is 128 random bits."""
        tensors = request.tensors
        sampling, constraint = self._sampling(request)
        stop = StopOptions(
            strings=sampling.stop,
            include=sampling.include_stop_str_in_output,
            scope=self._stop_scope,
            min_tokens=sampling.min_tokens,
            token_ids=sampling.stop_token_ids,
        )
        prompt = self._prompt(tensors, stop)
        check_length(len(prompt.ids), self._max_model_len)
        grammar = self._grammars.build(constraint, prompt.options)
        if grammar is not None:
            sampling = replace(sampling, grammar=grammar.text, grammar_after=grammar.after)
        stream = tensors.get("stream", False)
        echo = ""
        if not tensors.get("exclude_input_in_output", True):
            if stream:
                raise InvalidInput(
                    "exclude_input_in_output", False, "must be true when `stream` is true"
                )
            echo = prompt.text
        return Prompted(
            input_ids=prompt.ids,
            sampling_parameters=sampling.to_json(),
            stream=stream,
            request_uid=secrets.token_hex(16),
            output_settings=OutputSettings(prompt.options, echo).to_json(),
        )

    def _sampling(self, request: TextRequest) -> tuple[SamplingParams, OutputConstraint | None]:
        """Request parameters, overridden by tensors, overridden by `sampling_parameters`."""
        values = {k: v for k, v in request.parameters.items() if k not in _PROTOCOL}
        for tensor, setting in _SETTINGS.items():
            if tensor in request.tensors:
                value = request.tensors[tensor]
                values[setting] = value.tolist() if hasattr(value, "tolist") else value
        if "sampling_parameters" in request.tensors:
            values |= SamplingParams.parse_object(request.tensors["sampling_parameters"])
        constraint = take_constraint(values)
        sampling = SamplingParams.from_mapping(values, self._defaults)
        if sampling.logprobs is None and any(
            request.tensors.get(name) for name in ("return_logprobs", "return_cumulative_logprob")
        ):
            sampling = replace(sampling, logprobs=0)
        if sampling.bad_words:
            sampling = replace(
                sampling, bad_words=(), bad_word_ids=self._spellings(sampling.bad_words)
            )
        return sampling, constraint

    def _spellings(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Each word's tokens, as it stands and after a space: both may be written."""
        encode = self._builder.tokenizer.encode
        forms = [form for word in words for form in (word, " " + word.lstrip())]
        return tuple(dict.fromkeys(tuple(encode(form, markers=False).tolist()) for form in forms))

    def _prompt(self, tensors: Mapping[str, Any], stop: StopOptions) -> Prompt:
        text = tensors.get("text_input")
        chat = {name: tensors[name] for name in CHAT_INPUTS if name in tensors}
        if "messages" in chat:
            if text:
                raise InvalidInput("text_input", text, "give this or `messages`, not both")
            return self._builder.from_chat(ChatRequest.from_inputs(**chat), stop)
        if chat:
            name = next(iter(chat))
            raise InvalidInput(name, chat[name], "needs `messages`")
        if text is None:
            raise InvalidInput("text_input", None, "give this or `messages`")
        if not text:
            raise InvalidInput("text_input", text, "the prompt is empty")
        return self._builder.from_text(text, stop)
