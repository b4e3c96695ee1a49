# SPDX-License-Identifier: Apache-2.0
"""Renders a checkpoint's own chat_template.jinja in a sandbox set up as transformers sets it up.

The sandbox stops access to Python's internals; it cannot stop a template that loops or fills the
memory, which is why the server renders in a separate process (`render_worker`). Messages are
expected normalised (`chat_request`); the template sees plain JSON values only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from glmserve.errors import CheckpointError, GlmServeError, InvalidInput

Message = dict[str, Any]
_CUT = "\U000fffe0glmserve-continue\U000fffe1"  # marks where a continued answer stays open


class TemplateFailure(GlmServeError):
    """A chat template raised or asked for something that the sandbox refuses."""

    code = "INVALID_ARG"


@dataclass(frozen=True)
class TemplateSource:
    """A template that has been read but not touched: compiling already runs its constants.

    `variables` are names that every rendering sees (special tokens); requests may override them.
    """

    text: str
    variables: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def exists(checkpoint_dir: str | Path) -> bool:
        """Whether a checkpoint brings a template of its own."""
        directory = Path(checkpoint_dir)
        if (directory / "chat_template.jinja").exists():
            return True
        return isinstance(_tokenizer_config(directory).get("chat_template"), str)

    @classmethod
    def from_checkpoint(
        cls, checkpoint_dir: str | Path, template_file: str | Path | None = None
    ) -> TemplateSource:
        """The template file named, else chat_template.jinja, else tokenizer_config.json's."""
        directory = Path(checkpoint_dir)
        config = _tokenizer_config(directory)
        path = Path(template_file) if template_file else directory / "chat_template.jinja"
        if path.exists():
            source = path.read_text("utf-8")
        elif not template_file and isinstance(config.get("chat_template"), str):
            source = config["chat_template"]
        else:
            raise CheckpointError(f"no chat template: {path.name} does not exist")
        return cls(source, _special_tokens(config))


class ChatTemplate:
    """One compiled template; `render` may be called any number of times.

    Whoever does not trust the template makes this object in a `render_worker` only.
    """

    def __init__(self, source: TemplateSource | str) -> None:
        """Raises CheckpointError if the template does not compile."""
        self._source = TemplateSource(source) if isinstance(source, str) else source
        try:
            self._template = _environment().from_string(self._source.text)
        except (jinja2.TemplateError, MemoryError, RecursionError, OverflowError) as error:
            reason = str(error) or type(error).__name__
            raise CheckpointError(f"the chat template does not compile: {reason}") from error

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text. `variables` are the request's chat_template_kwargs.

        With `continue_final_message` the prompt ends where the last assistant message's content
        ends and its turn stays open. Raises TemplateFailure if the template fails, InvalidInput
        if there is no assistant message to continue.
        """
        if continue_final_message:
            messages = _mark_end(messages)
            add_generation_prompt = False
        try:
            text = self._template.render(
                **{
                    **self._source.variables,
                    **(variables or {}),
                    "messages": messages,
                    "tools": tools,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except jinja2.exceptions.SecurityError as error:
            raise TemplateFailure(f"the chat template was refused: {error}") from error
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise TemplateFailure(f"the chat template failed: {error}") from error
        except (AttributeError, MemoryError, RecursionError, OverflowError) as error:
            raise TemplateFailure(f"the chat template failed: {type(error).__name__}") from error
        return _cut(text) if continue_final_message else text


def _mark_end(messages: Sequence[Message]) -> list[Message]:
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or last.get("tool_calls"):
        raise InvalidInput(
            "continue_final_message",
            last.get("role"),
            "the last message must be an assistant message without tool calls",
        )
    content = last.get("content") or ""
    marked = (
        [*content, {"type": "text", "text": _CUT}] if isinstance(content, list) else content + _CUT
    )
    return [*messages[:-1], {**last, "content": marked}]


def _cut(text: str) -> str:
    position = text.rfind(_CUT)
    if position < 0:
        raise TemplateFailure("the chat template does not print the message to be continued")
    return text[:position]


def _tokenizer_config(directory: Path) -> dict[str, Any]:
    path = directory / "tokenizer_config.json"
    return dict(json.loads(path.read_text("utf-8"))) if path.exists() else {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            found[name] = value
    return found


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        dict=_Dict(),
        namespace=_Namespace,
        raise_exception=_raise_exception,
        strftime_now=lambda format: datetime.now().strftime(format),
    )
    return environment


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; here it prints its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja declares it without ClassVar)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Dict:
    """`dict(...)` and `dict.fromkeys(...)`, without the type object behind them."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """Jinja's namespace that refuses names beginning with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _refuse_underscore(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold the name {name!r}")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)
