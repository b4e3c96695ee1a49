# SPDX-License-Identifier: Apache-2.0
"""`glmserve make-checkpoint`: a small random checkpoint in the released layout."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

PRESETS = ("tiny", "block")
FORMATS = ("bf16", "fp8", "int4", "int4-g128", "int4-int8", "awq")


def add_subcommands(subparsers: Any) -> None:
    """Adds `make-checkpoint`; it sets `args.run`."""
    make = subparsers.add_parser("make-checkpoint", help="write a small random checkpoint")
    make.add_argument("directory")
    make.add_argument("--preset", choices=PRESETS, default="tiny")
    make.add_argument("--seed", type=int, default=0)
    make.add_argument("--format", choices=FORMATS, default="bf16", help="how weights are stored")
    make.set_defaults(run=run_make_checkpoint)


def run_make_checkpoint(args: argparse.Namespace) -> int:
    # torch takes seconds to import, and no other command of this process needs it.
    from glmserve.checkpoint.synthetic import make_checkpoint

    make_checkpoint(Path(args.directory), args.preset, args.seed, args.format)
    print(f"{args.directory}: preset {args.preset}, seed {args.seed}, {args.format}")
    return 0
