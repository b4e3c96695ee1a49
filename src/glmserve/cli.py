# SPDX-License-Identifier: Apache-2.0
"""The `glmserve` command. Subcommands live in their rooms; this file only joins them."""

from __future__ import annotations

import argparse
import sys

from glmserve import __version__
from glmserve.checkpoint import commands as checkpoint_commands
from glmserve.checkpoint import plan_commands
from glmserve.engine import commands as engine_commands
from glmserve.errors import GlmServeError
from glmserve.runtime import bench_commands
from glmserve.server import commands as server_commands
from glmserve.text import commands as text_commands


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="glmserve", description="Serve GLM-5.2/5.3 on Triton.")
    parser.add_argument("--version", action="version", version=f"glmserve {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    offered = (
        server_commands,
        engine_commands,
        checkpoint_commands,
        plan_commands,
        bench_commands,
        text_commands,
    )
    for commands in offered:
        commands.add_subcommands(subparsers)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs one subcommand; an expected error is one line on stderr and exit status 1."""
    args = build_parser().parse_args(argv)
    try:
        status: int = args.run(args)
        return status
    except (GlmServeError, OSError) as error:
        print(f"glmserve {args.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
