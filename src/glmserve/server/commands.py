# SPDX-License-Identifier: Apache-2.0
"""`glmserve serve`: options of the embedded server. What they do is in `launcher.py`."""

from __future__ import annotations

import argparse
from typing import Any

from glmserve.server.launcher import ServeOptions, serve

# Options that are settings of the engine: each sets GLMSERVE_<NAME> for everything started.
_ENGINE_OPTIONS = (
    "checkpoint",
    "ranks",
    "device",
    "dtype",
    "drafts",
    "chunk",
    "pages",
    "max_rows",
    "max_model_len",
    "expert_layout",
    "collectives",
    "synthetic",
)


def add_subcommands(subparsers: Any) -> None:
    """Adds `serve`; it sets `args.run`."""
    parser = subparsers.add_parser("serve", help="serve a checkpoint with a tritonserver")
    parser.add_argument("--checkpoint", help="default: checkpoints/tiny")
    parser.add_argument("--ranks", type=int, help="rank processes (default: 8, or one a GPU)")
    parser.add_argument("--device", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", choices=["fp64", "fp32", "bf16"])
    parser.add_argument("--drafts", type=int, help="MTP draft tokens a step")
    parser.add_argument("--chunk", type=int, help="prefill tokens a step")
    parser.add_argument("--pages", type=int, help="cache pages of 64 tokens")
    parser.add_argument("--max-rows", type=int, help="sequences that run at the same time")
    parser.add_argument("--max-model-len", type=int, help="longest prompt + output")
    parser.add_argument("--expert-layout", choices=["ep", "sliced"])
    parser.add_argument("--collectives", choices=["shm", "gloo", "nccl"])
    parser.add_argument(
        "--synthetic", action="store_true", default=None, help="random weights, no files of them"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    for name, port in (("http", 8000), ("grpc", 8001), ("metrics", 8002)):
        parser.add_argument(
            f"--{name}-port", type=int, default=port, help=f"default {port}; 0 = any free one"
        )
    parser.set_defaults(run=run_serve)


def run_serve(args: argparse.Namespace) -> int:
    """Serves until a signal; the exit code says whether the server ended by itself."""
    given = {name: getattr(args, name) for name in _ENGINE_OPTIONS}
    settings = {
        f"GLMSERVE_{name.upper()}": str(value) for name, value in given.items() if value is not None
    }
    return serve(
        ServeOptions(
            settings=settings,
            host=args.host,
            http_port=args.http_port,
            grpc_port=args.grpc_port,
            metrics_port=args.metrics_port,
        )
    )
