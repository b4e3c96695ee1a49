# SPDX-License-Identifier: Apache-2.0
"""Names of GLM's control tokens: one place for every literal that the text stages know.

Ids are never written down here: they come from a checkpoint's tokenizer.json.
"""

from __future__ import annotations

THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"

# Tokens that steer the output parser. They have text of their own when they do not.
OUTPUT_MARKERS = (THINK, THINK_END, CALL, CALL_END, KEY, KEY_END, VALUE, VALUE_END)

ENDOFTEXT = "<|endoftext|>"
SYSTEM, USER, ASSISTANT, OBSERVATION = "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"
ROLES = (SYSTEM, USER, ASSISTANT, OBSERVATION)
EOS = (ENDOFTEXT, USER, OBSERVATION)  # all three end an answer
PAD = ENDOFTEXT

# Added tokens in id order; the special ones never give text.
SPECIAL_TOKENS = (
    ENDOFTEXT,
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    *ROLES,
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
    "<|begin_of_audio|>",
    "<|end_of_audio|>",
    "<|begin_of_transcription|>",
    "<|end_of_transcription|>",
)
TEXT_TOKENS = (
    "<|code_prefix|>",
    "<|code_middle|>",
    "<|code_suffix|>",
    THINK,
    THINK_END,
    CALL,
    CALL_END,
    "<tool_response>",
    "</tool_response>",
    KEY,
    KEY_END,
    VALUE,
    VALUE_END,
    "/nothink",
    "<|begin_of_box|>",
    "<|end_of_box|>",
    "<|image|>",
    "<|video|>",
)
ADDED_TOKENS = tuple((name, True) for name in SPECIAL_TOKENS) + tuple(
    (name, False) for name in TEXT_TOKENS
)
