# SPDX-License-Identifier: Apache-2.0
"""The one registry of environment variables, and the environment that child processes get.

Every setting is a typed `EnvVar`; nothing else in the project reads `os.environ` for settings.
The README's table is checked against `REGISTRY` by a test.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from glmserve.errors import ConfigError

T = TypeVar("T")
REGISTRY: dict[str, EnvVar[object]] = {}

# NVLink multicast on a shared host can take its GPUs down, so every process that we start turns
# it off in each library that could use it.
REQUIRED_CHILD_ENV: Mapping[str, str] = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}

# Ranks and stubs are many on few cores: library thread pools would only fight each other.
_ONE_THREAD: Mapping[str, str] = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class EnvVar(Generic[T]):
    """One variable: `get()` parses it, or returns `default` when it is unset or empty."""

    name: str
    parse: Callable[[str], T]
    default: T
    doc: str

    def __post_init__(self) -> None:
        assert self.name not in REGISTRY, self.name
        REGISTRY[self.name] = self  # type: ignore[assignment]

    def is_set(self) -> bool:
        return bool(os.environ.get(self.name))

    def get(self) -> T:
        """Returns the typed value; ConfigError names the variable when it does not parse."""
        raw = os.environ.get(self.name, "")
        if not raw:
            return self.default
        try:
            return self.parse(raw)
        except ValueError as error:
            raise ConfigError(self.name, raw, str(error)) from None


def parse_bool(raw: str) -> bool:
    """'1/true/yes/on' and '0/false/no/off' in any case; ValueError otherwise."""
    word = raw.strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise ValueError("expected a boolean: 1/0, true/false, yes/no or on/off")


def one_of(*words: str) -> Callable[[str], Any]:
    """A parser of one of `words`."""

    def parse(raw: str) -> Any:
        if raw not in words:
            raise ValueError(f"expected one of {', '.join(words)}")
        return raw

    return parse


def parse_object(raw: str) -> dict[str, Any]:
    """A JSON object; ValueError otherwise."""
    value = json.loads(raw)
    if not isinstance(value, dict):
        raise ValueError("expected a JSON object")
    return value


def child_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns this process's environment with the required switches and `extra` applied.

    The multicast switches are applied last: neither the caller's environment nor `extra` can
    turn multicast back on.
    """
    environment = {**_ONE_THREAD, **os.environ, **(extra or {})}
    environment.update(REQUIRED_CHILD_ENV)
    return environment


CHECKPOINT = EnvVar("GLMSERVE_CHECKPOINT", str, "", "Directory of the checkpoint to serve.")
RANKS = EnvVar("GLMSERVE_RANKS", int, 0, "Rank processes, a power of two; 0 = one a GPU, 8 on CPU.")
DEVICE = EnvVar("GLMSERVE_DEVICE", str, "", "`cpu` or `cuda`; default: cuda when a GPU is present.")
DTYPE = EnvVar(
    "GLMSERVE_DTYPE", str, "", "`bf16`, `fp32`, `fp64`; default bf16 (cuda), fp64 (cpu)."
)
PAGES = EnvVar(
    "GLMSERVE_PAGES",
    int,
    0,
    "Cache pages of 64 tokens a rank; 0 = all that fit (cuda), 16 for each row (cpu).",
)
GPU_MEMORY_GB = EnvVar(
    "GLMSERVE_GPU_MEMORY_GB",
    float,
    0.0,
    "Memory of its GPU that a rank may use, 10^9 bytes; 0 = what is free at start.",
)
SYNTHETIC = EnvVar(
    "GLMSERVE_SYNTHETIC",
    parse_bool,
    False,
    "Random weights made on the device in the config's format; no file of weights is read.",
)
MAX_ROWS = EnvVar("GLMSERVE_MAX_ROWS", int, 64, "Sequences that run at the same time.")
MAX_MODEL_LEN = EnvVar(
    "GLMSERVE_MAX_MODEL_LEN", int, 0, "Longest prompt + output; 0 = all that fits."
)
CHUNK = EnvVar("GLMSERVE_CHUNK", int, 256, "Prefill tokens a step.")
DRAFTS = EnvVar("GLMSERVE_DRAFTS", int, 0, "Draft tokens of the MTP layer a step, 0 to 8.")
EXPERT_LAYOUT = EnvVar(
    "GLMSERVE_EXPERT_LAYOUT", str, "ep", "`ep` (whole experts a rank) or `sliced` (columns)."
)
COLLECTIVES = EnvVar(
    "GLMSERVE_COLLECTIVES", str, "", "`shm`, `gloo` or `nccl`; default shm (cpu), nccl (cuda)."
)
LATENT_NORM_EPS = EnvVar(
    "GLMSERVE_LATENT_NORM_EPS",
    float,
    1e-5,
    "Epsilon of the latent norms (transformers: 1e-6).",
)
KV_DTYPE: EnvVar[Literal["auto", "model", "fp8"]] = EnvVar(
    "GLMSERVE_KV_DTYPE",
    one_of("auto", "model", "fp8"),
    "auto",
    "Caches in `fp8` or as the `model` computes; `auto`: fp8 on a GPU where the sizes fit.",
)
ALLOW_REFERENCE = EnvVar(
    "GLMSERVE_ALLOW_REFERENCE", parse_bool, False, "CUDA: plain torch where no kernel serves."
)
GRAPHS = EnvVar(
    "GLMSERVE_GRAPHS", parse_bool, True, "CUDA, bf16: steps are replayed as CUDA graphs."
)
PDL = EnvVar(
    "GLMSERVE_PDL", parse_bool, True, "CUDA: a kernel's programs start while the one before ends."
)
MAX_QUEUE = EnvVar("GLMSERVE_MAX_QUEUE", int, 1024, "Waiting requests before UNAVAILABLE.")
RUNTIME_DIR = EnvVar(
    "GLMSERVE_RUNTIME_DIR", str, "", "Private directory of the relay socket between the stages."
)
CACHE_DIR = EnvVar(
    "GLMSERVE_CACHE_DIR",
    str,
    "",
    "Prepared server binaries, compiled kernels; default ~/.cache/glmserve.",
)
ENGINE = EnvVar(
    "GLMSERVE_ENGINE",
    str,
    "",
    "Token source instead of the engine: `module:Class` or `file.py:Class`.",
)
KEEP_ALIVE = EnvVar(
    "GLMSERVE_KEEP_ALIVE",
    float,
    1.0,
    "Silent seconds until a stream gets an empty answer; 0: never.",
)
PLAIN_USER_TEXT = EnvVar(
    "GLMSERVE_PLAIN_USER_TEXT",
    parse_bool,
    False,
    "Markers that user or tool text spells are encoded as plain text.",
)
UNKNOWN_TOOL: EnvVar[Literal["drop", "forward"]] = EnvVar(
    "GLMSERVE_UNKNOWN_TOOL",
    one_of("drop", "forward"),
    "drop",
    "Calls of undeclared tools: `drop` or `forward`.",
)
STOP_SCOPE: EnvVar[Literal["raw", "content"]] = EnvVar(
    "GLMSERVE_STOP_SCOPE",
    one_of("raw", "content"),
    "raw",
    "Where stop strings count: `raw` text or `content` only.",
)
CHAT_TEMPLATE_KWARGS: EnvVar[dict[str, Any]] = EnvVar(
    "GLMSERVE_CHAT_TEMPLATE_KWARGS",
    parse_object,
    {},
    "JSON object; a request's own block is merged over it.",
)
