# SPDX-License-Identifier: Apache-2.0
"""The training twin computes what the served model computes, from the files that it writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from glmserve.checkpoint.reader import load_weights
from glmserve.model.batch import StepBatch
from glmserve.model.caches import Caches
from glmserve.model.decoder import Decoder
from glmserve.model.mtp import Mtp
from glmserve.model_config import ModelConfig
from glmserve.parallel.group import SingleGroup
from tests.tolerances import assert_close
from tools.tiny import export
from tools.tiny.objective import Batch, Runner
from tools.tiny.twin import Twin

LENGTH = 90  # three times the trial's index_topk


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ModelConfig]:
    directory = tmp_path_factory.mktemp("twin")
    config = export.new_config(directory, "trial")
    twin = Twin(config, seed=4)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in [*twin.parameters(), *twin.buffers()]:  # nothing stays one or zero
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * (0.2 if parameter.dim() < 2 else 0.02))
    export.save_weights(twin, directory)
    return directory, config


def _batch(config: ModelConfig) -> Batch:
    """Two rows; the second holds two conversations."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, config.vocab_size, (2, LENGTH), generator=generator)
    positions = torch.arange(LENGTH).repeat(2, 1)
    documents = torch.zeros(2, LENGTH, dtype=torch.long)
    documents[1, 70:] = 1
    positions[1, 70:] = torch.arange(LENGTH - 70)
    return Batch(ids, positions, documents, torch.ones(2, LENGTH))


@torch.inference_mode()
def test_twin_equals_the_served_model_with_selection_and_mtp(
    checkpoint: tuple[Path, ModelConfig],
) -> None:
    directory, config = checkpoint
    twin = Twin(config).double()
    export.load_weights(twin, directory)
    batch = _batch(config)
    got = Runner(twin, torch.float64).forward(batch, sparse=2, drafting=2)

    weights = load_weights(directory, config, 0, 1, "ep", torch.float64, "cpu")
    decoder = Decoder(config, weights, SingleGroup())
    mtp = Mtp(config, weights, SingleGroup())
    for row, start, end in ((0, 0, LENGTH), (1, 0, 70), (1, 70, LENGTH)):
        caches = Caches.allocate(config, 4, 64, torch.float64, "cpu")
        ids = batch.ids[row, start:end]
        count = len(ids)
        table = torch.tensor([[2, 0, 1]], dtype=torch.int32)
        step = StepBatch(ids, torch.arange(count), torch.zeros(count, dtype=torch.long), table)
        hidden = decoder.forward(step, caches)
        assert_close("hidden", hidden, got.hidden[row, start:end], "same_fp64")
        logits = decoder.logits(hidden)
        assert_close("logits", logits, twin.logits(got.hidden[row, start:end]), "same_fp64")
        # Pass 1 over all rows, then one more pass from every row with that row's selection.
        known = count - 3  # rows whose next tokens are their own conversation's
        step = step.select(torch.arange(known))
        out, selection = mtp.forward(step, ids[1 : known + 1], hidden[:known], caches, None, True)
        assert_close("draft 1", out, got.drafts[0][row, start : start + known], "same_fp64")
        for i in (0, known // 2, known - 1):
            one, reused = step.select(torch.tensor([i])), selection.select(torch.tensor([i]))
            state = out[i : i + 1]
            for k in (2, 3):
                one = one.advance()
                saved = caches.mtp.latent.clone()  # this pass writes into the next row's slot
                state, _ = mtp.forward(one, ids[i + k : i + k + 1], state, caches, reused, False)
                caches.mtp.latent.copy_(saved)
                assert_close("draft", state[0], got.drafts[k - 1][row, start + i], "same_fp64")
