# SPDX-License-Identifier: Apache-2.0
"""From a request to token ids and the output stage's options: the whole input side of `text`.

Owns the tokenizer, the template and the render worker of one checkpoint. Whether the prompt fits
into the context is the caller's check, who knows the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from glmserve.errors import InvalidInput
from glmserve.text.chat_request import ChatRequest
from glmserve.text.normalize import normalize_messages, shield_literals
from glmserve.text.output_options import OutputOptions, StopOptions, UnknownTool
from glmserve.text.render_worker import RenderWorker
from glmserve.text.start_state import start_of_ids
from glmserve.text.template import ChatTemplate, TemplateSource
from glmserve.text.template_traits import TemplateTraits, probe
from glmserve.text.tokenizer import Ids, Tokenizer

# Private characters around markers that a user has spelled; a pair that the request does not use.
_SHIELDS = tuple((chr(code), chr(code + 1)) for code in range(0x10FF00, 0x10FF40, 2))


@dataclass(frozen=True)
class Prompt:
    """A prompt ready for the engine: ids [T] int32, its text, and what its answer needs."""

    ids: Ids
    text: str
    options: OutputOptions


class PromptBuilder:
    """Everything that turns requests into prompts; safe to call from several threads."""

    def __init__(
        self,
        checkpoint_dir: str | Path,
        *,
        template_file: str | Path | None = None,
        plain_user_text: bool = False,
        unknown_tool: UnknownTool = "drop",
        worker: bool = True,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        """plain_user_text: markers spelled in user and tool text are encoded as text.
        unknown_tool: what becomes of calls to tools that the request did not declare.
        worker: render in a limited child process. defaults: the server's chat_template_kwargs,
        over which a request's own are merged. Raises CheckpointError. A checkpoint without a
        template serves text prompts only.
        """
        self.tokenizer = Tokenizer(checkpoint_dir)
        self._plain_user_text = plain_user_text
        self._unknown_tool: UnknownTool = unknown_tool
        self._defaults = dict(defaults or {})
        self._renderer: Renderer | None = None
        if template_file or TemplateSource.exists(checkpoint_dir):
            source = TemplateSource.from_checkpoint(checkpoint_dir, template_file)
            self._renderer = Renderer(source, worker)

    def close(self) -> None:
        """End the render worker."""
        if self._renderer is not None:
            self._renderer.close()

    def from_text(self, text: str, stop: StopOptions | None = None) -> Prompt:
        """A prompt that is already rendered; raises InvalidInput naming `text_input`.

        Its answer is split into reasoning and content only if it ends in an assistant's opening.
        """
        ids = self._encode("text_input", text, None)
        start = start_of_ids(self.tokenizer, ids)
        options = OutputOptions(
            start=start.start, mid_text=start.mid_text, stop=stop or StopOptions()
        )
        return Prompt(ids, text, options)

    def from_chat(self, chat: ChatRequest, stop: StopOptions | None = None) -> Prompt:
        """Render and encode a chat; raises InvalidInput naming the field, or TemplateFailure."""
        if self._renderer is None:
            raise InvalidInput("messages", "...", "this checkpoint has no chat template")
        messages = normalize_messages(chat.messages, self._renderer.traits)
        shield = None
        if self._plain_user_text:
            shield = _free_shield(messages)
            messages = shield_literals(messages, [*self.tokenizer.added_tokens], *shield)
        text = self._renderer.render(chat, messages, self._defaults)
        ids = self._encode("messages", text, shield)
        if shield is not None:
            text = text.replace(shield[0], "").replace(shield[1], "")
        start = start_of_ids(self.tokenizer, ids)
        options = OutputOptions(
            # A chat's answer is always parsed, also after a prompt without an opening.
            start="auto" if start.start == "off" else start.start,
            mid_text=start.mid_text,
            tools=callable_tools(chat),
            tool_choice=chat.tool_choice,
            parallel_tool_calls=chat.parallel_tool_calls,
            unknown_tool=self._unknown_tool,
            stop=stop or StopOptions(),
        )
        return Prompt(ids, text, options)

    def _encode(self, field: str, text: str, shield: tuple[str, str] | None) -> Ids:
        try:
            if shield is not None:
                return self.tokenizer.encode_shielded(text, *shield)
            return self.tokenizer.encode(text)
        except (TypeError, UnicodeError):
            raise InvalidInput(field, text, "holds half of a surrogate pair") from None


class Renderer:
    """A template with its traits, in the worker process or in this one."""

    def __init__(self, source: TemplateSource, worker: bool) -> None:
        """Starts the worker process, if one is wanted; raises CheckpointError."""
        self._source = source
        self._worker = RenderWorker(source) if worker else None
        if worker:
            _ = self.traits  # now, not during the first request

    @cached_property
    def traits(self) -> TemplateTraits:
        """What the template does; found out when first needed."""
        return probe(self._call)

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self._source)

    def close(self) -> None:
        """End the worker process, if there is one."""
        if self._worker is not None:
            self._worker.close()

    def render(
        self, chat: ChatRequest, messages: list[dict[str, Any]], defaults: Mapping[str, Any]
    ) -> str:
        """The prompt of `chat`, whose messages have been normalised to `messages`."""
        return self._call(
            {
                "messages": messages,
                "tools": chat.tools,
                "add_generation_prompt": chat.add_generation_prompt,
                "continue_final_message": chat.continue_final_message,
                "variables": template_variables(chat, self.traits, defaults),
            }
        )

    def _call(self, arguments: Mapping[str, Any]) -> str:
        if self._worker is not None:
            return self._worker.render(arguments)
        return self._template.render(**arguments)


def template_variables(
    chat: ChatRequest, traits: TemplateTraits, defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """What the template sees besides messages and tools, the request's own words last.

    Server defaults, then the top-level fields (reasoning_effort mapped to what the template
    knows), then chat_template_kwargs verbatim.
    """
    variables = dict(defaults)
    if chat.reasoning_effort is not None:
        variables |= _effort(chat.reasoning_effort, traits)
    if chat.thinking.get("type") is not None:
        variables["enable_thinking"] = chat.thinking["type"] == "enabled"
    if chat.thinking.get("clear_thinking") is not None:
        variables["clear_thinking"] = chat.thinking["clear_thinking"]
    if chat.enable_thinking is not None:
        variables["enable_thinking"] = chat.enable_thinking
    return variables | chat.chat_template_kwargs


def _effort(effort: str, traits: TemplateTraits) -> dict[str, Any]:
    """OpenAI's reasoning_effort in the template's words; GLM-5.3 has no way to think nothing."""
    if effort == "none" and traits.has_off_switch:
        return {"enable_thinking": False}
    if effort in ("none", "minimal", "low"):
        return {"reasoning_effort": "low" if traits.knows_low else "high"}
    return {"reasoning_effort": "high" if effort in ("medium", "high") else "max"}


def callable_tools(chat: ChatRequest) -> tuple[dict[str, Any], ...] | None:
    """The tools that the answer may call."""
    if not chat.tools:
        return None
    allowed = chat.callable_tools
    return tuple(
        tool for tool in chat.tools if allowed is None or tool["function"]["name"] in allowed
    )


def _free_shield(messages: list[dict[str, Any]]) -> tuple[str, str]:
    everything = repr(messages)  # escapes unassigned characters, so both spellings are looked for
    for opening, closing in _SHIELDS:
        spelled = (opening, closing, ascii(opening)[1:-1], ascii(closing)[1:-1])
        if not any(word in everything for word in spelled):
            return opening, closing
    raise InvalidInput("messages", "...", "holds every private character that could shield text")
