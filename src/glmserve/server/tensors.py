# SPDX-License-Identifier: Apache-2.0
"""The one table of tensors that cross the inference server's borders, for all four models.

`model_repository/*/config.pbtxt` says the same in the server's language; a test compares the two.
Names, ranks and dtypes of the first group are those of the vLLM backend, so that its clients and
the stock OpenAI frontend work; TensorRT-LLM's names follow as 1-D aliases; ours stand beside them.
What a sampling setting means is not said here but in `sampling_params`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Dtype = Literal["STRING", "BOOL", "INT32", "UINT32", "UINT64", "FP32"]


@dataclass(frozen=True)
class Tensor:
    """One named tensor: `dims` as in config.pbtxt (-1 = any length), no batch dimension."""

    name: str
    dtype: Dtype
    dims: tuple[int, ...]
    doc: str
    optional: bool = True  # of inputs; an output is always emitted unless its doc says otherwise


@dataclass(frozen=True)
class ModelTensors:
    """What one model takes and gives."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


_NEUTRAL: Final = "Accepted with the value that means off, refused otherwise."

_CLIENT_INPUTS: Final = (
    Tensor("text_input", "STRING", (1,), "Prompt text, already rendered; this or `messages`."),
    Tensor("stream", "BOOL", (1,), "Answer in pieces; default false: one response."),
    Tensor("sampling_parameters", "STRING", (1,), "JSON object; wins over every other way."),
    Tensor("exclude_input_in_output", "BOOL", (1,), "Default true; false needs `stream` false."),
    Tensor("return_logprobs", "BOOL", (1,), "Same as `logprobs` 0 where no count is given."),
    Tensor("return_cumulative_logprob", "BOOL", (1,), "As `return_logprobs`."),
    Tensor("return_finish_reason", "BOOL", (1,), "Accepted; the output is always there."),
    Tensor("return_num_input_tokens", "BOOL", (1,), "Accepted; the output is always there."),
    Tensor("return_num_output_tokens", "BOOL", (1,), "Accepted; the output is always there."),
    # TensorRT-LLM's names
    Tensor("max_tokens", "INT32", (1,), "Most new tokens; default: the context's rest."),
    Tensor("temperature", "FP32", (1,), "0 = greedy."),
    Tensor("top_k", "INT32", (1,), "0 or -1 = off."),
    Tensor("top_p", "FP32", (1,), "In (0, 1]."),
    Tensor("seed", "UINT64", (1,), "Makes a sampled answer reproducible."),
    Tensor("stop_words", "STRING", (-1,), "Texts that end the answer; they are cut off."),
    Tensor("min_tokens", "INT32", (1,), "The answer cannot end before."),
    Tensor("repetition_penalty", "FP32", (1,), "In (0, 10]; 1 = off."),
    Tensor("presence_penalty", "FP32", (1,), "In [-2, 2]; 0 = off."),
    Tensor("frequency_penalty", "FP32", (1,), "In [-2, 2]; 0 = off."),
    Tensor("length_penalty", "FP32", (1,), _NEUTRAL),
    Tensor("beam_width", "INT32", (1,), _NEUTRAL),
    Tensor("num_return_sequences", "INT32", (1,), "The setting `n`: answers to make, 1 to 16."),
    Tensor("bad_words", "STRING", (-1,), "Texts that must not be written."),
    Tensor(
        "guided_decoding_guide_type",
        "STRING",
        (1,),
        "What the guide is: json (needs none), json_schema, regex or ebnf_grammar.",
    ),
    Tensor("guided_decoding_guide", "STRING", (1,), "The schema, pattern or grammar to follow."),
    # ours
    Tensor("stop_token_ids", "INT32", (-1,), "Token ids that end the answer."),
    Tensor("ignore_eos", "BOOL", (1,), "Go on past the end-of-sequence ids."),
    Tensor("priority", "INT32", (1,), "Lower runs sooner; default 0."),
    Tensor("deadline", "FP32", (1,), "Seconds from arrival until the request is ended."),
    Tensor("response_format", "STRING", (1,), "JSON object as OpenAI's; follows `</think>`."),
    Tensor("messages", "STRING", (1,), "JSON list of chat messages."),
    Tensor("tools", "STRING", (1,), "JSON list of tools, with `messages`."),
    Tensor("tool_choice", "STRING", (1,), "`auto`, `none`, `required`, or a JSON object."),
    Tensor("parallel_tool_calls", "BOOL", (1,), "false = at most one tool call."),
    Tensor("chat_template_kwargs", "STRING", (1,), "JSON object given to the chat template."),
    Tensor("reasoning_effort", "STRING", (1,), "none, minimal, low, medium, high, xhigh or max."),
    Tensor("thinking", "STRING", (1,), "JSON object {type, clear_thinking}."),
    Tensor("enable_thinking", "BOOL", (1,), "Given to the chat template."),
    Tensor("add_generation_prompt", "BOOL", (1,), "Default true."),
    Tensor("continue_final_message", "BOOL", (1,), "Leave the last assistant message open."),
)

_CLIENT_OUTPUTS: Final = (
    Tensor("text_output", "STRING", (-1,), "New answer text."),
    Tensor("reasoning_content", "STRING", (-1,), "New reasoning text."),
    Tensor("tool_calls", "STRING", (-1,), "JSON list of tool-call deltas; empty list = none."),
    Tensor(
        "finish_reason",
        "STRING",
        (-1,),
        "Empty until the last data response: stop, length, tool_calls, abort or error.",
    ),
    Tensor("stop_reason", "STRING", (-1,), "The stop string or stop id met, as JSON."),
    Tensor("cumulative_logprob", "FP32", (-1,), "Sum over the answer so far; 0 unless asked."),
    Tensor("logprobs", "STRING", (-1,), "JSON list, an object a new token; `null` unless asked."),
    Tensor(
        "prompt_logprobs",
        "STRING",
        (1,),
        "The same for the prompt from its second token on, in the first response that has them.",
    ),
    Tensor("num_input_tokens", "UINT32", (1,), "Prompt tokens."),
    Tensor("num_cached_tokens", "UINT32", (1,), "Prompt tokens that the prefix cache had."),
    Tensor("num_output_tokens", "UINT32", (-1,), "New tokens of this response."),
    Tensor("num_reasoning_tokens", "UINT32", (-1,), "Reasoning tokens among them."),
    Tensor("request_uid", "STRING", (1,), "The request's unique id."),
    Tensor("index", "UINT32", (-1,), "0, 1, 2 ... of this choice's responses."),
    Tensor("sequence_index", "INT32", (-1,), "Which of the `n` choices this is, from 0."),
    Tensor("error_message", "STRING", (-1,), "Why finish_reason is `error`."),
)

_TOKENS_IN: Final = (
    Tensor("input_ids", "INT32", (-1,), "Prompt tokens; only `stop` goes without."),
    Tensor("sampling_parameters", "STRING", (1,), "JSON object of sampling settings."),
    Tensor("stream", "BOOL", (1,), "false: one response with every token."),
    Tensor("request_uid", "STRING", (1,), "Made by preprocess; a direct caller may leave it out."),
    Tensor(
        "output_settings",
        "STRING",
        (1,),
        "JSON for postprocess, returned with the first "
        "response; its presence says that postprocess acknowledges.",
    ),
    Tensor("stop", "BOOL", (1,), "true: end the request that `request_uid` names."),
)

_TOKENS_OUT: Final = (
    Tensor("output_ids", "INT32", (-1,), "New tokens."),
    Tensor("finish_reason", "STRING", (-1,), "Empty until the last data response."),
    Tensor("stop_token", "INT32", (-1,), "The id that ended the answer, -1 = none."),
    Tensor("num_input_tokens", "UINT32", (1,), "Prompt tokens."),
    Tensor("num_cached_tokens", "UINT32", (1,), "Prompt tokens that the prefix cache had."),
    Tensor("num_output_tokens", "UINT32", (-1,), "New tokens of this response."),
    Tensor("request_uid", "STRING", (1,), "The request's unique id."),
    Tensor("index", "UINT32", (-1,), "0, 1, 2 ... of this choice's responses."),
    Tensor("sequence_index", "INT32", (-1,), "Which of the `n` choices this is, from 0."),
    Tensor("error_message", "STRING", (-1,), "Why finish_reason is `error`."),
    Tensor("output_settings", "STRING", (1,), "As received; in the first response only."),
    Tensor(
        "logprobs",
        "STRING",
        (-1,),
        "JSON list of [id, logprob, [[id, logprob] ...]], one a new token; absent unless asked.",
    ),
    Tensor("prompt_logprobs", "STRING", (1,), "The same for the prompt; absent when it has none."),
)

# Inputs of glm_dsa that only its direct callers give.
DIRECT: Final = ("stop",)

# Outputs of glm_dsa that only some of its responses have.
_SOMETIMES: Final = ("output_settings", "logprobs", "prompt_logprobs")

MODELS: Final[dict[str, ModelTensors]] = {
    "preprocess": ModelTensors(
        _CLIENT_INPUTS,
        tuple(
            Tensor(t.name, t.dtype, t.dims, t.doc, optional=False)
            for t in _TOKENS_IN
            if t.name not in DIRECT
        ),
    ),
    "glm_dsa": ModelTensors(_TOKENS_IN, _TOKENS_OUT),
    "postprocess": ModelTensors(
        tuple(
            Tensor(t.name, t.dtype, t.dims, t.doc, optional=t.name in _SOMETIMES)
            for t in _TOKENS_OUT
        ),
        _CLIENT_OUTPUTS,
    ),
    "ensemble": ModelTensors(_CLIENT_INPUTS, _CLIENT_OUTPUTS),
}
