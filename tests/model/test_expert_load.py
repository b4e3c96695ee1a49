# SPDX-License-Identifier: Apache-2.0
"""Expert load: the totals are the routers' choices of every layer, without padding rows."""

from __future__ import annotations

from pathlib import Path

import torch

from glmserve.checkpoint.synthetic import make_checkpoint
from glmserve.model.expert_load import ExpertLoad
from glmserve.model.taps import Taps
from tests.model.ranks import batch_of, load

PADDING = 1


def test_totals_are_the_choices_of_all_layers_and_of_the_mtp_layer(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "tiny", 3)
    model = load(tmp_path, torch.float64, pages=12)
    layers = [*model.decoder.layers, model.mtp.layer]
    load_of = ExpertLoad(model.config, layers, PADDING, torch.device("cpu"))
    table = torch.tensor([[7, 1, 9], [2, 8, 0]], dtype=torch.int32)
    tokens = torch.arange(4, 84)
    target, drafts = Taps(), Taps()
    with torch.inference_mode():
        for line, length in ((0, 80), (PADDING, 9)):
            batch = batch_of(tokens[:length], 0, table, line)
            taps = (Taps(), Taps()) if line == PADDING else (target, drafts)
            hidden = model.decoder.forward(batch, model.caches, taps[0])
            model.mtp.forward(batch, batch.tokens, hidden, model.caches, None, True, taps[1])
    chosen = [routing.ids for routing in (*target.routing, *drafts.routing)]
    assert len(drafts.routing) == 1 and len(chosen) == len(load_of.totals)
    experts = model.config.n_routed_experts
    expected = torch.stack([ids.flatten().bincount(minlength=experts) for ids in chosen])
    assert torch.equal(load_of.totals, expected)
    assert (load_of.totals.sum(1) == 80 * model.config.num_experts_per_tok).all()
