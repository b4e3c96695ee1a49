# SPDX-License-Identifier: Apache-2.0
"""A config without files of weights runs: the same tokens on one rank and on two."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from glmserve.checkpoint.synthetic import make_checkpoint
from glmserve.config import EngineConfig
from glmserve.engine.client import EngineClient
from glmserve.engine.commands import complete
from glmserve.sampling_params import SamplingParams


def test_synthetic_weights_serve_without_files_on_any_width(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "tiny", 3, "fp8")
    for file in tmp_path.glob("model*.safetensors*"):
        file.unlink()
    prompt = np.arange(5, 45, dtype=np.int32)
    sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    answers = []
    for ranks in (1, 2):
        config = EngineConfig(
            str(tmp_path), ranks=ranks, num_pages=8, max_rows=1, drafts=1, synthetic=True
        )
        lines: list[str] = []
        client = EngineClient.start(config, lines.append)
        try:
            assert client.info.parameter_bytes == client.info.share_bytes
            chunks = complete(client, prompt, sampling)
            answers.append([token for chunk in chunks for token in chunk.token_ids])
        finally:
            client.close()
        assert any("synthetic" in line for line in lines)
    assert answers[0] == answers[1]
    assert len(set(answers[0])) > 1
