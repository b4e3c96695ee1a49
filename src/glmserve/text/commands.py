# SPDX-License-Identifier: Apache-2.0
"""`glmserve render` and `glmserve parse`: the two text stages on a command line.

For people who debug templates and parsers: both read standard input and need no engine.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from glmserve.errors import InvalidInput
from glmserve.text import client_json
from glmserve.text.chat_request import CHAT_INPUTS, ChatRequest
from glmserve.text.normalize import normalize_messages
from glmserve.text.output_options import OutputOptions, StopOptions
from glmserve.text.parse_text import ParsedAnswer, parse_text
from glmserve.text.prompt import PromptBuilder, Renderer, callable_tools
from glmserve.text.start_state import start_of_text
from glmserve.text.template import TemplateSource


def add_subcommands(subparsers: Any) -> None:
    """Add `render` and `parse`; each sets `args.run`, a function of the arguments."""
    render = subparsers.add_parser("render", help="print the prompt of a chat request (stdin)")
    render.add_argument("--checkpoint", metavar="DIR", help="where template and tokenizer are")
    render.add_argument("--template", metavar="FILE", help="use this template instead")
    render.add_argument("--ids", action="store_true", help="print token ids, not text")
    render.add_argument(
        "--plain-user-text",
        action="store_true",
        help="encode markers in user and tool text as text (with --ids)",
    )
    render.set_defaults(run=run_render)

    parse = subparsers.add_parser("parse", help="parse a model's answer (stdin) into JSON")
    parse.add_argument("--prompt-tail", required=True, metavar="TEXT", help="end of the prompt")
    parse.add_argument("--tools", metavar="FILE", help="JSON list of the request's tools")
    parse.add_argument("--tool-choice", metavar="X", help="auto, none, required or JSON")
    parse.add_argument("--unknown-tool", choices=("drop", "forward"), default="drop")
    parse.add_argument("--no-parallel-tool-calls", action="store_true")
    parse.add_argument("--finish", choices=("stop", "length"), default="stop")
    parse.add_argument("--stop", action="append", default=[], metavar="S", help="may be repeated")
    parse.add_argument("--stop-scope", choices=("raw", "content"), default="raw")
    parse.add_argument("--include-stop", action="store_true")
    parse.add_argument("--chunk", type=int, metavar="N", help="feed N bytes at a time")
    parse.add_argument("--stream", action="store_true", help="print each delta on a line")
    parse.set_defaults(run=run_parse)


def run_render(args: argparse.Namespace) -> int:
    """Print the prompt exactly (no line end is added to the text)."""
    chat = read_chat(sys.stdin.buffer.read().decode("utf-8", "replace"))
    if args.ids:
        if not args.checkpoint:
            raise InvalidInput("--checkpoint", None, "needed to encode with --ids")
        builder = PromptBuilder(
            args.checkpoint,
            template_file=args.template,
            plain_user_text=args.plain_user_text,
        )
        try:
            print(json.dumps(builder.from_chat(chat).ids.tolist()))
        finally:
            builder.close()
        return 0
    if not (args.checkpoint or args.template):
        raise InvalidInput("--checkpoint", None, "give this or --template")
    template = TemplateSource.from_checkpoint(args.checkpoint or ".", args.template)
    sys.stdout.buffer.write(render_chat(template, chat).encode())
    return 0


def run_parse(args: argparse.Namespace) -> int:
    """Print the answer as one JSON object, or its deltas one a line."""
    source = sys.stdin.buffer.read()
    if args.chunk is not None and args.chunk < 1:
        raise InvalidInput("--chunk", args.chunk, "must be at least 1")
    tools = Path(args.tools).read_bytes() if args.tools else None
    choice = ChatRequest.from_inputs(
        messages=[{"role": "user", "content": ""}], tools=tools, tool_choice=args.tool_choice
    )
    start = start_of_text(args.prompt_tail)
    options = OutputOptions(
        start=start.start,
        mid_text=start.mid_text,
        tools=callable_tools(choice),
        tool_choice=choice.tool_choice,
        parallel_tool_calls=not args.no_parallel_tool_calls,
        unknown_tool=args.unknown_tool,
        stop=StopOptions(tuple(args.stop), args.include_stop, args.stop_scope),
    )
    answer = ParsedAnswer()
    size = args.chunk or max(1, len(source))
    chunks = (source[start : start + size] for start in range(0, len(source), size))
    for delta in parse_text(chunks, options, args.finish):
        answer.add(delta)
        if args.stream:
            fields = delta._asdict()
            fields["content"] = fields.pop("text")  # as in the whole answer
            changed = {key: value for key, value in fields.items() if value}
            print(json.dumps(changed, ensure_ascii=False))
    if not args.stream:
        print(json.dumps(answer.as_dict(), ensure_ascii=False))
    return 0


def read_chat(source: str) -> ChatRequest:
    """A chat request from the JSON of an OpenAI-style body; other fields are ignored."""
    body = client_json.loads("request", source)
    if not isinstance(body, dict):
        raise InvalidInput("request", body, "must be a JSON object")
    return ChatRequest.from_inputs(
        **{"messages": None, **{name: body[name] for name in CHAT_INPUTS if name in body}}
    )


def render_chat(template: TemplateSource, chat: ChatRequest) -> str:
    """The prompt of one request, rendered in a worker process as the server does."""
    renderer = Renderer(template, worker=True)
    try:
        return renderer.render(chat, normalize_messages(chat.messages, renderer.traits), {})
    finally:
        renderer.close()
