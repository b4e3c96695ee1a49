# SPDX-License-Identifier: Apache-2.0
"""Text in, text out: chat template, tokenizer, detokenizer, stop strings, reasoning and tool calls.

Pure functions and small objects without torch, transformers or the server: the server's text
stages call them, and so do the `render` and `parse` commands.
"""
