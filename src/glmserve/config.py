# SPDX-License-Identifier: Apache-2.0
"""Engine settings: one frozen dataclass, checked once, shared by the server, the engine and ranks.

What the model is comes from the checkpoint (`model_config.ModelConfig`); this is how it is run.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from glmserve import env
from glmserve.errors import ConfigError

PAGE_SIZE = 64  # tokens of a cache page; DESIGN: prefix hits are multiples of it
MAX_DRAFTS = 8
MOST_STEPS_IN_FLIGHT = 16
MOST_SCORES = 1 << 28  # index scores alive at once on a rank: 1 GB of fp32

Device = Literal["cpu", "cuda"]
Dtype = Literal["bf16", "fp32", "fp64"]
ExpertLayout = Literal["ep", "sliced"]
Collectives = Literal["shm", "gloo", "nccl"]
KvDtype = Literal["auto", "model", "fp8"]


@dataclass(frozen=True)
class EngineConfig:
    """How a checkpoint is run. Every field is checked on construction (ConfigError names it)."""

    checkpoint: str
    ranks: int = 1  # processes, one a GPU; TP and EP both have this width
    device: Device = "cpu"
    dtype: Dtype = "fp64"
    expert_layout: ExpertLayout = "ep"
    collectives: Collectives = "shm"
    # Cache pages of PAGE_SIZE tokens, the same on every rank; 0 on CUDA: as many as fit.
    num_pages: int = 512
    max_rows: int = 64  # sequences that run at the same time
    chunk: int = 256  # prefill tokens a step, shared by the prompts in it
    drafts: int = 0  # MTP draft tokens a step
    max_model_len: int = 0  # prompt + output; 0 = the model's own limit
    max_queue: int = 1024  # waiting requests before Unavailable
    valid_tokens: int = 0  # ids below it may be drawn; 0 = every row of the head
    latent_norm_eps: float = 1e-5  # MODEL §8.1: 1e-6 for parity with transformers
    kv_dtype: KvDtype = "auto"  # of the caches; auto = fp8 where GPU, bf16 and the model allow it
    # Later draft passes reuse the first pass's selection; None = as the checkpoint says.
    share_draft_index: bool | None = None
    gpu_memory_gb: float = 0.0  # 10^9 bytes that a rank may use of its GPU; 0 = what is free
    synthetic: bool = False  # random weights made on the device; only the config is read
    allow_reference: bool = False  # on CUDA: plain torch where no Triton kernel serves the shape
    steps_in_flight: int = 16  # most plans sent before the oldest result is needed
    graphs: bool = True  # on CUDA in bf16, without references: steps are replayed as CUDA graphs
    page_seed: int | None = None  # hand pages out in a seeded random order (tests)
    capture_dir: str = ""  # rank 0 records what it computes there (offline commands)

    def __post_init__(self) -> None:
        def need(ok: bool, key: str, reason: str) -> None:
            if not ok:
                raise ConfigError(key, getattr(self, key), reason)

        need(bool(self.checkpoint), "checkpoint", "a checkpoint directory is required")
        need(self.ranks in (1, 2, 4, 8), "ranks", "must be 1, 2, 4 or 8 (a power of two, one node)")
        need(self.device in ("cpu", "cuda"), "device", "must be 'cpu' or 'cuda'")
        need(self.dtype in ("bf16", "fp32", "fp64"), "dtype", "must be 'bf16', 'fp32' or 'fp64'")
        need(self.expert_layout in ("ep", "sliced"), "expert_layout", "must be 'ep' or 'sliced'")
        need(
            self.collectives in (("shm", "gloo") if self.device == "cpu" else ("nccl",)),
            "collectives",
            f"not available on device '{self.device}'",
        )
        need(self.kv_dtype in ("auto", "model", "fp8"), "kv_dtype", "must be auto, model or fp8")
        need(1 <= self.max_rows <= 4096, "max_rows", "must be in 1..4096")
        planned = self.num_pages == 0 and self.device == "cuda"
        need(self.num_pages >= 2 or planned, "num_pages", "must be at least 2")
        need(self.gpu_memory_gb >= 0, "gpu_memory_gb", "must not be negative")
        need(1 <= self.chunk <= 65536, "chunk", "must be in 1..65536 tokens")
        need(0 <= self.drafts <= MAX_DRAFTS, "drafts", f"must be in 0..{MAX_DRAFTS}")
        need(self.max_model_len >= 0, "max_model_len", "must not be negative")
        need(self.valid_tokens >= 0, "valid_tokens", "must not be negative")
        need(self.max_queue >= 1, "max_queue", "must be at least 1")
        need(0.0 < self.latent_norm_eps < 1.0, "latent_norm_eps", "must be in (0, 1)")
        need(
            1 <= self.steps_in_flight <= MOST_STEPS_IN_FLIGHT,
            "steps_in_flight",
            f"must be in 1..{MOST_STEPS_IN_FLIGHT}",
        )

    @property
    def lookahead(self) -> int:
        """Cache slots past a sequence's length that one step may write.

        Target rows reach `drafts` positions ahead; the MTP entry of a position lies one slot
        later, and the draft passes go on from the last verified row: length - 1 + 2 * drafts.
        """
        return 2 * self.drafts + 1 if self.drafts else 0

    @property
    def pages_per_row(self) -> int:
        """Width of a page table row: pages of the longest sequence and its lookahead."""
        return -(-(self.max_model_len + self.lookahead) // PAGE_SIZE)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))

    def with_limits(self, model_limit: int) -> Self:
        """Returns a copy whose `max_model_len` is set and fits the model and the page pool."""
        # One page is the scratch of padding rows.
        pool = (self.num_pages - 1) * PAGE_SIZE - self.lookahead
        if self.num_pages == 0:  # planned when the engine starts, which checks again
            pool = self.max_model_len or model_limit
        wanted = self.max_model_len or min(model_limit, pool)
        if wanted > model_limit:
            raise ConfigError("max_model_len", wanted, f"the model's limit is {model_limit}")
        if wanted > pool:
            raise ConfigError("max_model_len", wanted, f"{self.num_pages} pages hold {pool} tokens")
        return dataclasses.replace(self, max_model_len=wanted)


def cuda_devices() -> int:
    """Counts the NVIDIA devices that may be used, without touching CUDA (the stub and the engine
    must not)."""
    found = sum(1 for node in Path("/dev").glob("nvidia[0-9]*") if node.name[6:].isdigit())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return found
    return min(found, len([name for name in visible.split(",") if name.strip()]))


def default_device() -> str:
    """The setting, else cuda when a GPU is present."""
    return env.DEVICE.get() or ("cuda" if cuda_devices() else "cpu")


def engine_config_from_env(**overrides: Any) -> EngineConfig:
    """Builds the settings from GLMSERVE_* variables; `overrides` that are not None win.

    Defaults follow the device: on CUDA one rank a GPU, bf16 and NCCL; on CPU eight ranks, fp64
    (so that results do not depend on what else is in the batch) and shared memory.
    """
    given = {key: value for key, value in overrides.items() if value is not None}
    devices = cuda_devices()
    device: Any = given.pop("device", None) or default_device()
    on_cuda = device == "cuda"
    default_ranks = 1 << (min(devices, 8).bit_length() - 1) if on_cuda and devices else 8
    max_rows = given.get("max_rows", env.MAX_ROWS.get())
    values: dict[str, Any] = {
        "checkpoint": env.CHECKPOINT.get(),
        "ranks": env.RANKS.get() or (default_ranks if on_cuda else 8),
        "dtype": env.DTYPE.get() or ("bf16" if on_cuda else "fp64"),
        "expert_layout": env.EXPERT_LAYOUT.get(),
        "collectives": env.COLLECTIVES.get() or ("nccl" if on_cuda else "shm"),
        "num_pages": env.PAGES.get() or (0 if on_cuda else max_rows * 16 + 1),
        "max_rows": max_rows,
        "chunk": env.CHUNK.get(),
        "drafts": env.DRAFTS.get(),
        "max_model_len": env.MAX_MODEL_LEN.get(),
        "max_queue": env.MAX_QUEUE.get(),
        "latent_norm_eps": env.LATENT_NORM_EPS.get(),
        "kv_dtype": env.KV_DTYPE.get(),
        "gpu_memory_gb": env.GPU_MEMORY_GB.get(),
        "synthetic": env.SYNTHETIC.get(),
        "allow_reference": env.ALLOW_REFERENCE.get(),
        "graphs": env.GRAPHS.get(),
    }
    values.update(given)
    values["checkpoint"] = os.path.abspath(values["checkpoint"]) if values["checkpoint"] else ""
    return EngineConfig(device=device, **values)
