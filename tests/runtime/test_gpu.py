# SPDX-License-Identifier: Apache-2.0
"""The engine with its rank on a GPU: in fp64 the same tokens as on the CPU, drafts or not.

fp64 runs the reference operators there, so this holds the runtime (row state, packing, sampler,
drafting, prefix hits on device tensors), not the kernels, whose own tests compare in bf16 and fp8.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from glmserve.checkpoint.synthetic import make_checkpoint
from glmserve.config import EngineConfig
from glmserve.engine.client import EngineClient
from glmserve.messages import Request
from glmserve.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu


def tokens_of(config: EngineConfig) -> dict[str, list[int]]:
    generator = np.random.default_rng(0)
    greedy = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    seeded = SamplingParams(
        max_tokens=20,
        temperature=0.8,
        top_p=0.9,
        top_k=50,
        min_p=0.01,
        seed=1 << 63,
        repetition_penalty=1.2,
        logit_bias=((5, 2.0),),
        bad_word_ids=((5, 5),),
        min_tokens=20,
        logprobs=2,
    )
    client = EngineClient.start(config)
    try:
        tokens: dict[str, list[int]] = {}
        for i, length in enumerate((9, 70, 140, 140)):
            prompt = generator.integers(0, 900, length).astype(np.int32)
            for name, sampling in (("greedy", greedy), ("seeded", seeded)):
                tokens[f"{name}{i}"] = []
                client.submit(Request(f"{name}{i}", prompt, sampling))
        running = set(tokens)
        while running:
            for chunk in client.receive(60.0):
                tokens[chunk.uid] += chunk.token_ids
                if chunk.finish_reason:
                    assert chunk.finish_reason == "length", chunk
                    running.discard(chunk.uid)
        return tokens
    finally:
        client.close()


@pytest.mark.parametrize("preset", ["tiny", "block"])
def test_fp64_tokens_equal_those_of_the_cpu(tmp_path: Path, preset: str) -> None:
    make_checkpoint(tmp_path, preset, 1)
    sizes = {"num_pages": 64, "max_rows": 8, "allow_reference": True}
    want = tokens_of(EngineConfig(str(tmp_path), **sizes))  # type: ignore[arg-type]
    for drafts, chunk in ((0, 256), (3, 50)):
        gpu = EngineConfig(
            str(tmp_path), device="cuda", collectives="nccl", drafts=drafts, chunk=chunk, **sizes
        )  # type: ignore[arg-type]
        assert tokens_of(gpu) == want


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_other_dtypes_serve_to_the_end(tmp_path: Path, dtype: str) -> None:
    make_checkpoint(tmp_path, "block", 1)
    config = EngineConfig(
        str(tmp_path),
        device="cuda",
        collectives="nccl",
        dtype=dtype,
        num_pages=64,
        max_rows=8,
        allow_reference=True,
    )  # type: ignore[arg-type]
    assert all(len(tokens) == 20 for tokens in tokens_of(config).values())
